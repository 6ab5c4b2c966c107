// Bundles the page into dist/: the program, its fonts and the library's icons.

import {cpSync, mkdirSync, rmSync} from 'node:fs';
import {dirname, join} from 'node:path';
import {fileURLToPath} from 'node:url';

import {build} from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, 'dist');

// The library's text editor, half of its size: no board has one, and it is only loaded when shown.
const withoutEditor = {
  name: 'without-editor',
  setup(setup) {
    setup.onResolve({filter: /^(monaco-editor|@monaco-editor\/)/}, (found) => ({path: found.path, namespace: 'nothing'}));
    setup.onLoad({filter: /.*/, namespace: 'nothing'}, () => ({contents: 'module.exports = {};'}));
  },
};

rmSync(dist, {recursive: true, force: true});
mkdirSync(dist, {recursive: true});
await build({
  entryPoints: [join(here, 'src', 'main.tsx')],
  outdir: dist,
  bundle: true,
  format: 'iife',
  platform: 'browser',
  target: 'chrome110',
  minify: true,
  legalComments: 'none',
  define: {'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'globalThis'},
  jsx: 'transform',
  logLevel: 'warning',
  plugins: [withoutEditor],
});
cpSync(join(here, 'src', 'index.html'), join(dist, 'index.html'));
// Icons are looked up below this path at run time.
const modules = join(here, 'node_modules');
cpSync(join(modules, '@grafana', 'ui', 'dist', 'public'), join(dist, 'public', 'build'), {recursive: true});
// So is the font, of which Grafana ships a copy; whole, because legends have arrows.
for (const weight of ['Regular', 'Medium']) {
  cpSync(join(modules, 'inter-ui', 'web', `Inter-${weight}.woff2`), join(dist, 'public', 'fonts', 'inter', `Inter-${weight}.woff2`));
}
