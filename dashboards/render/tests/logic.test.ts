// The page's own logic: what is asked, and how answers become shapes. Run by `npm test`.

import assert from 'node:assert/strict';
import {test} from 'node:test';

import {rowFor, rowsOf} from '../src/buckets';
import {distinct, thin} from '../src/exemplars';
import {leastMs, rateMs, stepMs} from '../src/intervals';
import {tagsOf} from '../src/logfmt';
import {marksOf} from '../src/marks';
import {mayBeEmpty} from '../src/outcome';
import {runsOf} from '../src/runs';
import {rootOf, ticks, waterfall} from '../src/spans';
import {choose, fill, type Scope, timed} from '../src/variables';

const worker = {name: 'worker', type: 'query', query: 'q', multi: true, includeAll: true, allValue: '.*', current: {value: '$__all', text: 'All'}};
const stage = {name: 'stage', type: 'custom', query: 'a,b', current: {value: 'decode.reserve', text: 'decode.reserve'}};
const scope = (asked: Record<string, string[]>): Scope => ({
  chosen: choose([worker, stage], asked), builtIn: {__rate_interval: '20s'}, fromMs: 1, toMs: 2,
});

test('a variable takes the form of the place it stands in', () => {
  const all = scope({});
  const two = scope({worker: ['decode-0', 'a.b']});
  assert.equal(fill('x{i=~"$worker"}[$__rate_interval]', all, {}, 'promql'), 'x{i=~".*"}[20s]');
  assert.equal(fill('${worker}', two, {}, 'promql'), '(decode-0|a\\\\.b)');
  assert.equal(fill('$stage', all, {}, 'promql'), 'decode.reserve');
  assert.equal(fill('/d/x?${worker:queryparam}&${__url_time_range}', two), '/d/x?var-worker=decode-0&var-worker=a.b&from=1&to=2');
  assert.equal(fill('${__value.raw} ${__field.labels.stage} $unknown', all, {raw: 7, labels: {stage: 's'}}), '7 s $unknown');
});

test('a variable that the board lacks is refused', () => {
  assert.throws(() => choose([worker], {stgae: ['x']}), /no variable stgae/);
});

test('points are never closer than the least step, a rate looks back four of them', () => {
  assert.equal(stepMs(300_000, 700, 5000), 5000);
  assert.equal(stepMs(86_400_000, 700, 5000), 120_000);
  assert.equal(stepMs(604_800_000, 700, 15_000), 900_000);
  assert.equal(stepMs(604_800_000, 200_000, 1000), 60_000);
  assert.equal(stepMs(31_536_000_000, 10, 15_000), 86_400_000);
  assert.equal(rateMs(5000, 5000), 20_000);
  assert.equal(rateMs(300_000, 5000), 305_000);
});

test("a query's least step is its own, which may be a variable, or else the scrape interval", () => {
  assert.deepEqual(['', '500ms', '30s', '>1m'].map((text) => leastMs(text, 5000)), [5000, 500, 30_000, 60_000]);
  assert.throws(() => leastMs('soon', 5000), /not soon/);
  const step = {name: 'step', type: 'custom', query: '5s,30s', current: {value: '30s', text: '30s'}};
  const settings = {fromMs: 0, toMs: 300_000, scrapeMs: 5000} as any;
  const windows = (interval: string | undefined, asked: Record<string, string[]>): string[] => {
    const {scope} = timed(interval, settings, choose([step], asked), 700);
    return [scope.builtIn.__interval, scope.builtIn.__rate_interval];
  };
  assert.deepEqual(windows('$step', {}), ['30s', '120s']);
  assert.deepEqual(windows('$step', {step: ['5s']}), ['5s', '20s']);
  assert.deepEqual(windows('1m', {}), ['60s', '240s']);
  assert.deepEqual(windows(undefined, {}), ['5s', '20s']);
});

test('cumulative buckets become rows, whatever their order', () => {
  const rows = rowsOf([
    {le: '+Inf', timesMs: [0, 1], values: [9, null]},
    {le: '0.5', timesMs: [0, 1], values: [2, 4]},
    {le: '1.5', timesMs: [0, 1], values: [7, 3]},
  ]);
  assert.deepEqual(rows.edges, [0.5, 1.5, Infinity]);
  assert.deepEqual(rows.counts, [[2, 4], [5, 0], [2, null]]);
  assert.equal(rowFor(0.5, rows.edges), 0);
  assert.equal(rowFor(0.6, rows.edges), 1);
  assert.equal(rowFor(99, rows.edges), 2);
});

test('an exemplar is drawn once, and of many near each other the highest', () => {
  const at = (timeMs: number, value: number, traceId: string) => ({timeMs, value, traceId, labels: {}});
  const many = [at(0, 1, 'a'), at(0, 1, 'a'), at(1, 1.1, 'b'), at(2, 90, 'c'), at(10, 1, 'd')];
  assert.equal(distinct(many).length, 4);
  assert.deepEqual(thin(distinct(many), 10).map((one) => one.traceId), ['c', 'a', 'd']);
});

test('tags are pairs', () => {
  assert.deepEqual(tagsOf('pd.stall.stage=transfer b="c \\"d"'), {'pd.stall.stage': 'transfer', b: 'c "d'});
  assert.throws(() => tagsOf('a=b c'), /not key=value/);
});

test('a state ends where nothing is known', () => {
  assert.deepEqual(runsOf([0, 5, 10, 20], [1, 1, null, 1], 5), [
    {fromMs: 0, toMs: 10, value: 1}, {fromMs: 20, toMs: 25, value: 1},
  ]);
});

test('a mark is one stretch', () => {
  assert.deepEqual(marksOf([0, 5, 20], 5, 'red', 't').map((one) => [one.fromMs, one.toMs]), [[0, 5], [20, 20]]);
});

test('only a sentence that says so lets a panel be empty', () => {
  const panel = (description: string, expr = 'up') => ({
    id: 1, type: 'stat', title: 't', description, gridPos: {x: 0, y: 0, w: 1, h: 1},
    targets: [{refId: 'A', datasource: {type: 'prometheus', uid: 'p'}, expr}],
  });
  const all = choose([worker], {});
  assert.equal(mayBeEmpty(panel('Alerts. Empty while none fires.\n\nNot shown: x.'), all), true);
  assert.equal(mayBeEmpty(panel('What is left. Nothing is Empty while x.'), all), false);
  assert.equal(mayBeEmpty(panel('Empty panels are bad.'), all), false);
  const where = 'Batch. Empty where none of these has one.';
  const one = choose([worker], {worker: ['gateway-0']});
  assert.equal(mayBeEmpty(panel(where, 'up{instance=~"$worker"}'), all), false);
  assert.equal(mayBeEmpty(panel(where, 'up{instance=~"$worker"}'), one), true);
  assert.equal(mayBeEmpty(panel(where), one), false);
});

test('a waterfall has children below their parent, and the foreign parent of a root is none', () => {
  const span = (spanID: string, parent: string | null, startTime: number, traceID = 't') => ({
    spanID, operationName: spanID, startTime, duration: 10, processID: 'p', tags: [],
    references: parent === null ? [] : [{refType: 'CHILD_OF', traceID, spanID: parent}],
  });
  const trace = {
    traceID: 't', processes: {p: {serviceName: 's'}},
    spans: [span('late', 'root', 30), span('deep', 'early', 25), span('early', 'root', 20), span('root', 'caller', 10)],
  };
  assert.equal(rootOf(trace).spanID, 'root');
  const fall = waterfall(trace);
  assert.deepEqual(fall.lines.map((line) => `${line.depth}${line.name}@${line.startUs}`), ['0root@0', '1early@10', '2deep@15', '1late@20']);
  assert.equal(fall.durationUs, 30);
  assert.deepEqual(ticks(100, 5), [0, 20, 40, 60, 80, 100]);
});
