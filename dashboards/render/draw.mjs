// Opens the page in headless Chromium once for each board and theme, and takes its picture.
//
// Reads one JSON document from standard input, {chromium, out, sources, timeoutMs, colours, pages: [{name, settings}]},
// and writes one to standard output, {pages: [{name, picture, report, failure, console}]}. PNGs go to `out`, in as
// many colours at most, or in all where `colours` is null.

import {writeFile} from 'node:fs/promises';
import {dirname, join} from 'node:path';
import {text} from 'node:stream/consumers';
import {fileURLToPath} from 'node:url';

import {chromium} from 'playwright-core';

import {reduced} from './palette.mjs';
import {serve} from './serving.mjs';

const FLAGS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage', '--force-color-profile=srgb',
  '--hide-scrollbars',
];

const MOST_PX = 12_000;
const QUIET_MS = 300;
const POLL_MS = 25;

/** What a page asks for, until nothing has been under way for a while. */
class Fetches {
  constructor(tab) {
    this.pending = new Set();
    tab.on('request', (request) => this.pending.add(request));
    tab.on('requestfinished', (request) => this.pending.delete(request));
    tab.on('requestfailed', (request) => this.pending.delete(request));
  }

  async all() {
    const started = Date.now();
    for (let quiet = Date.now(); Date.now() - quiet < QUIET_MS && Date.now() - started < asked.timeoutMs;) {
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      if (this.pending.size > 0) {
        quiet = Date.now();
      }
    }
  }
}

const asked = JSON.parse(await text(process.stdin));
let current = asked.pages[0]?.settings;
const dist = join(dirname(fileURLToPath(import.meta.url)), 'dist');
const server = await serve({dist, sources: asked.sources, settings: () => current});
const browser = await chromium.launch({executablePath: asked.chromium, args: FLAGS, timeout: asked.timeoutMs});
const pages = [];
try {
  for (const page of asked.pages) {
    current = page.settings;
    pages.push(await draw(page));
  }
} finally {
  await browser.close();
  await server.close();
}
process.stdout.write(JSON.stringify({pages}));

async function draw({name, settings}) {
  const context = await browser.newContext({
    viewport: {width: settings.widthPx, height: 1000}, timezoneId: 'UTC', colorScheme: settings.theme, reducedMotion: 'reduce',
  });
  const tab = await context.newPage();
  const said = [];
  const fetched = new Fetches(tab);
  tab.on('console', (message) => message.type() === 'error' && said.push(message.text().slice(0, 500)));
  tab.on('response', (response) => response.status() >= 400 && said.push(`${response.status()} ${response.url()}`));
  tab.on('pageerror', (error) => said.push(String(error.stack ?? error).slice(0, 1000)));
  let failure = null;
  try {
    await tab.goto(server.url, {timeout: asked.timeoutMs});
    await tab.waitForFunction(() => window.pdtraceReport || window.pdtraceFailure, undefined, {timeout: asked.timeoutMs});
    failure = await tab.evaluate(() => window.pdtraceFailure ?? null);
  } catch (error) {
    failure = `not drawn within ${asked.timeoutMs / 1000} s: ${error.message.split('\n')[0]}`;
  }
  // All of it within sight, also for what is only drawn when it is seen.
  const heightPx = await tab.evaluate(() => document.documentElement.scrollHeight);
  await tab.setViewportSize({width: settings.widthPx, height: Math.min(heightPx, MOST_PX)});
  await tab.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
  await fetched.all(); // icons, which are fetched when they are seen
  const report = await tab.evaluate(() => window.pdtraceReport ?? null);
  const picture = join(asked.out, `${name}.png`);
  const png = await tab.screenshot({fullPage: true, animations: 'disabled', timeout: asked.timeoutMs});
  await context.close();
  await writeFile(picture, asked.colours === null ? png : reduced(png, asked.colours));
  return {name, picture, report, failure, console: [...new Set(said)].slice(0, 20)};
}
