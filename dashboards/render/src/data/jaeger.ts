// Jaeger: its search as the table that Grafana's data source makes of it, and one trace.

import {type DataFrame, FieldType, toDataFrame} from '@grafana/data';

import type {Target} from '../board';
import {tagsOf} from '../logfmt';
import {type JaegerTrace, rootOf} from '../spans';
import {getJson} from './fetching';

const API = '/jaeger/api/traces';

/** `target` has its variables filled in. */
export async function askJaeger(target: Target, fromMs: number, toMs: number): Promise<DataFrame[]> {
  if (target.queryType === 'search') {
    return [await search(target, fromMs, toMs)];
  }
  if (target.queryType !== undefined) {
    throw new Error(`cannot ask Jaeger for ${target.queryType}`);
  }
  if (!target.query) {
    throw new Error('no trace id was given');
  }
  const body = await getJson(`${API}/${encodeURIComponent(target.query)}`, {});
  return [toDataFrame({refId: target.refId, fields: [{name: 'trace', type: FieldType.other, values: body.data}]})];
}

async function search(target: Target, fromMs: number, toMs: number): Promise<DataFrame> {
  const body = await getJson(API, {
    service: target.service ?? '',
    ...(target.operation ? {operation: target.operation} : {}),
    ...(target.tags ? {tags: JSON.stringify(tagsOf(target.tags))} : {}),
    ...(target.minDuration ? {minDuration: target.minDuration} : {}),
    limit: String(target.limit ?? 20),
    start: String(fromMs * 1000),
    end: String(toMs * 1000),
    lookback: 'custom',
  });
  const rows = (body.data as JaegerTrace[]).map((trace) => ({trace, root: rootOf(trace)}));
  rows.sort((a, b) => b.root.startTime - a.root.startTime);
  const column = (name: string, displayName: string, type: FieldType, values: unknown[], unit?: string): any => ({
    name, type, values, config: {displayName, displayNameFromDS: displayName, ...(unit ? {unit} : {})},
  });
  return toDataFrame({
    refId: target.refId,
    fields: [
      column('traceID', 'Trace ID', FieldType.string, rows.map(({trace}) => trace.traceID)),
      column(
        'traceName', 'Trace name', FieldType.string,
        rows.map(({trace, root}) => `${trace.processes[root.processID].serviceName}: ${root.operationName}`),
      ),
      column('startTime', 'Start time', FieldType.time, rows.map(({root}) => root.startTime / 1000)),
      column('duration', 'Duration', FieldType.number, rows.map(({root}) => root.duration), 'µs'),
    ],
  });
}
