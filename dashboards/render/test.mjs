// Bundles the tests of the page for node, which cannot read TypeScript, and runs all tests.

import {spawnSync} from 'node:child_process';
import {dirname, join} from 'node:path';
import {fileURLToPath} from 'node:url';

import {build} from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const tests = join(here, 'tests');
const bundled = join(here, 'dist', 'tests', 'logic.test.mjs');
await build({entryPoints: [join(tests, 'logic.test.ts')], outfile: bundled, bundle: true, format: 'esm', platform: 'node', logLevel: 'warning'});
process.exitCode = spawnSync(process.execPath, ['--test', bundled, join(tests, 'palette.test.mjs')], {stdio: 'inherit'}).status ?? 1;
