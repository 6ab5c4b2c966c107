// The page and its data on loopback: files of dist/, the settings, and reading access to Prometheus and
// Jaeger. Of these only the paths that boards need, only GET, only so much, and only so long.

import {createServer} from 'node:http';
import {readFile} from 'node:fs/promises';
import {extname, join, normalize, sep} from 'node:path';

const TYPES = {
  '.css': 'text/css', '.html': 'text/html; charset=utf-8', '.js': 'text/javascript; charset=utf-8', '.json': 'application/json',
  '.svg': 'image/svg+xml', '.woff': 'font/woff', '.woff2': 'font/woff2',
};
const ALLOWED = [
  ['prometheus', /^\/api\/v1\/(query|query_range|query_exemplars|label\/\w+\/values)$/],
  ['jaeger', /^\/api\/traces(\/[0-9a-fA-F]{1,32})?$/],
];
const MOST_BYTES = 64 * 1024 * 1024;
const MOST_MS = 60_000;

/** `settings()` is what the page draws next. Resolves to the address and a function that ends it. */
export async function serve({dist, sources, settings}) {
  const server = createServer((request, response) => {
    answer(request, response, {dist, sources, settings}).catch((error) => {
      if (!response.headersSent) {
        response.writeHead(502, {'content-type': 'application/json'});
      }
      response.end(JSON.stringify({error: error.message}));
    });
  });
  await new Promise((resolve, reject) => {
    server.on('error', reject);
    server.listen(0, '127.0.0.1', resolve);
  });
  const close = () => new Promise((resolve) => {
    server.close(resolve);
    server.closeAllConnections();
  });
  return {url: `http://127.0.0.1:${server.address().port}`, close};
}

async function answer(request, response, {dist, sources, settings}) {
  const url = new URL(request.url, 'http://127.0.0.1');
  if (request.method !== 'GET') {
    response.writeHead(405).end();
    return;
  }
  if (url.pathname === '/settings.json') {
    response.writeHead(200, {'content-type': TYPES['.json']}).end(JSON.stringify(settings()));
    return;
  }
  for (const [name, paths] of ALLOWED) {
    if (url.pathname.startsWith(`/${name}/`)) {
      const path = url.pathname.slice(name.length + 1);
      if (!paths.test(path)) {
        response.writeHead(403, {'content-type': TYPES['.json']}).end(JSON.stringify({error: `not for boards: ${path}`}));
        return;
      }
      await pass(response, name, sources[name], path + url.search);
      return;
    }
  }
  await file(response, dist, url.pathname === '/' ? '/index.html' : url.pathname);
}

async function pass(response, name, source, path) {
  if (!source) {
    throw new Error(`no address of ${name} was given (--${name} URL)`);
  }
  let got;
  try {
    got = await fetch(source.replace(/\/+$/, '') + path, {signal: AbortSignal.timeout(MOST_MS), redirect: 'error'});
  } catch (error) {
    throw new Error(`${name} at ${source} does not answer: ${error.cause?.message ?? error.message}`);
  }
  const chunks = [];
  let bytes = 0;
  for await (const chunk of got.body) {
    bytes += chunk.length;
    if (bytes > MOST_BYTES) {
      throw new Error(`${name} answered with more than ${MOST_BYTES} bytes`);
    }
    chunks.push(chunk);
  }
  response.writeHead(got.status, {'content-type': got.headers.get('content-type') ?? TYPES['.json']});
  response.end(Buffer.concat(chunks));
}

async function file(response, dist, path) {
  const found = normalize(join(dist, decodeURIComponent(path)));
  if (!found.startsWith(dist + sep)) {
    response.writeHead(403).end();
    return;
  }
  try {
    const content = await readFile(found);
    response.writeHead(200, {'content-type': TYPES[extname(found)] ?? 'application/octet-stream'}).end(content);
  } catch {
    response.writeHead(404).end();
  }
}
