// Bundles the tests for node, which cannot read TypeScript, and runs them.

import {spawnSync} from 'node:child_process';
import {dirname, join} from 'node:path';
import {fileURLToPath} from 'node:url';

import {build} from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, 'dist', 'tests', 'logic.test.mjs');
await build({entryPoints: [join(here, 'tests', 'logic.test.ts')], outfile: out, bundle: true, format: 'esm', platform: 'node', logLevel: 'warning'});
process.exitCode = spawnSync(process.execPath, ['--test', out], {stdio: 'inherit'}).status ?? 1;
