// Prometheus: queries as data frames, exemplars, values of labels. Knows its HTTP API, no panels.

import {type DataFrame, FieldType, toDataFrame} from '@grafana/data';

import type {Target} from '../board';
import type {Exemplar} from '../exemplars';
import {getJson} from './fetching';

const API = '/prometheus/api/v1';

export interface Asked {
  expr: string;
  fromMs: number;
  toMs: number;
  stepMs: number;
}

type Labels = Record<string, string>;
interface Series {
  metric: Labels;
  value?: [number, string];
  values?: Array<[number, string]>;
}

/** Frames as Grafana makes them: one for each series, or one table. `several`: the panel has more queries. */
export async function ask(target: Target, asked: Asked, several: boolean): Promise<DataFrame[]> {
  const series = await seriesOf(target, asked);
  return target.format === 'table' ? [table(target, series, several)] : series.map((one) => line(target, one, asked));
}

export async function askExemplars(asked: Asked): Promise<Exemplar[]> {
  const body = await getJson(`${API}/query_exemplars`, {
    query: asked.expr,
    start: seconds(asked.fromMs),
    end: seconds(asked.toMs),
  });
  return body.data.flatMap((one: {seriesLabels: Labels; exemplars: any[]}) =>
    one.exemplars.map((exemplar) => ({
      timeMs: exemplar.timestamp * 1000,
      value: Number(exemplar.value),
      traceId: exemplar.labels.trace_id ?? '',
      labels: one.seriesLabels,
    })),
  );
}

/** Values of a query variable: `label_values(selector, label)`. */
export async function labelValues(query: string, fromMs: number, toMs: number): Promise<string[]> {
  const match = /^label_values\((.*),\s*(\w+)\)$/.exec(query);
  if (match === null) {
    throw new Error(`expected label_values(SELECTOR, LABEL), got ${query}`);
  }
  const body = await getJson(
    `${API}/label/${match[2]}/values`,
    {start: seconds(fromMs), end: seconds(toMs)},
    {'match[]': [match[1]]},
  );
  return body.data;
}

/** When an annotation's query had a value: stretches of each series. */
export async function askMarks(asked: Asked): Promise<Array<{labels: Labels; timesMs: number[]}>> {
  const series = await seriesOf({} as Target, asked);
  return series.map((one) => ({labels: one.metric, timesMs: (one.values ?? []).map(([time]) => time * 1000)}));
}

async function seriesOf(target: Target, asked: Asked): Promise<Series[]> {
  if (target.instant) {
    const body = await getJson(`${API}/query`, {query: asked.expr, time: seconds(asked.toMs)});
    return body.data.result;
  }
  const align = (ms: number): number => Math.floor(ms / asked.stepMs) * asked.stepMs;
  const body = await getJson(`${API}/query_range`, {
    query: asked.expr,
    start: seconds(align(asked.fromMs)),
    end: seconds(align(asked.toMs)),
    step: String(asked.stepMs / 1000),
  });
  return body.data.result;
}

function line(target: Target, series: Series, asked: Asked): DataFrame {
  const points = series.values ? onGrid(series.values, asked) : [series.value!];
  const name = legend(target.legendFormat, series.metric);
  return toDataFrame({
    refId: target.refId,
    name,
    fields: [
      {name: 'Time', type: FieldType.time, values: points.map(([time]) => time * 1000), config: {interval: asked.stepMs}},
      {
        name: 'Value',
        type: FieldType.number,
        labels: series.metric,
        values: points.map(([, value]) => finite(value)),
        config: {displayNameFromDS: name},
      },
    ],
  });
}

/** Every step of the range, so that a step without a value is a gap and no line is drawn across it. */
function onGrid(values: Array<[number, string]>, {fromMs, toMs, stepMs}: Asked): Array<[number, string]> {
  const known = new Map(values.map(([time, value]) => [Math.round(time * 1000), value]));
  const first = Math.floor(fromMs / stepMs);
  const count = Math.floor(toMs / stepMs) - first + 1;
  return Array.from({length: count}, (_, index) => {
    const ms = (first + index) * stepMs;
    return [ms / 1000, known.get(ms) ?? 'NaN'];
  });
}

function table(target: Target, series: Series[], several: boolean): DataFrame {
  const labels = [...new Set(series.flatMap((one) => Object.keys(one.metric)))].sort();
  const last = (one: Series): [number, string] => one.value ?? one.values![one.values!.length - 1];
  return toDataFrame({
    refId: target.refId,
    fields: [
      {name: 'Time', type: FieldType.time, values: series.map((one) => last(one)[0] * 1000)},
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        config: {filterable: true},
        values: series.map((one) => one.metric[label] ?? ''),
      })),
      {
        name: several ? `Value #${target.refId}` : 'Value',
        type: FieldType.number,
        values: series.map((one) => finite(last(one)[1])),
      },
    ],
  });
}

/** What is not a number (a ratio of nothing) is no value: a gap, never 0. */
function finite(value: string): number | null {
  const number = Number(value);
  return Number.isFinite(number) ? number : null;
}

function legend(format: string | undefined, labels: Labels): string {
  if (format && format !== '__auto') {
    return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');
  }
  const {__name__: name = '', ...rest} = labels;
  const inside = Object.entries(rest).map(([label, value]) => `${label}="${value}"`);
  return name || inside.length > 0 ? `${name}{${inside.join(', ')}}` : 'Value';
}

function seconds(ms: number): string {
  return String(ms / 1000);
}
