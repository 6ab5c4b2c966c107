// A trace in Jaeger's own JSON as lines of a waterfall: parents before children, by time. Pure.

export interface JaegerSpan {
  spanID: string;
  operationName: string;
  references?: Array<{refType: string; traceID: string; spanID: string}>;
  startTime: number;
  duration: number;
  processID: string;
  tags?: Array<{key: string; value: unknown}>;
}

export interface JaegerTrace {
  traceID: string;
  spans: JaegerSpan[];
  processes: Record<string, {serviceName: string; tags?: Array<{key: string; value: unknown}>}>;
}

export interface Line {
  id: string;
  depth: number;
  service: string;
  instance: string;
  name: string;
  /** From the first span's start. */
  startUs: number;
  durationUs: number;
  failed: boolean;
  tags: Map<string, unknown>;
}

export interface Waterfall {
  startUs: number;
  durationUs: number;
  lines: Line[];
}

export function waterfall(trace: JaegerTrace): Waterfall {
  const known = new Set(trace.spans.map((span) => span.spanID));
  const children = new Map<string, JaegerSpan[]>();
  for (const span of trace.spans) {
    const parent = parentOf(span, trace.traceID);
    const key = parent !== undefined && known.has(parent) ? parent : '';
    children.set(key, [...(children.get(key) ?? []), span]);
  }
  const startUs = Math.min(...trace.spans.map((span) => span.startTime));
  const endUs = Math.max(...trace.spans.map((span) => span.startTime + span.duration));
  const lines: Line[] = [];
  const add = (parent: string, depth: number): void => {
    const sorted = (children.get(parent) ?? []).sort((a, b) => a.startTime - b.startTime || b.duration - a.duration);
    for (const span of sorted) {
      lines.push(lineOf(span, trace, depth, startUs));
      add(span.spanID, depth + 1);
    }
  };
  add('', 0);
  return {startUs, durationUs: Math.max(endUs - startUs, 1), lines};
}

/** The span that nothing in the trace is the parent of; of several the first. */
export function rootOf(trace: JaegerTrace): JaegerSpan {
  const known = new Set(trace.spans.map((span) => span.spanID));
  const roots = trace.spans.filter((span) => !known.has(parentOf(span, trace.traceID) ?? ''));
  return (roots.length > 0 ? roots : trace.spans).reduce((a, b) => (b.startTime < a.startTime ? b : a));
}

/** Spaced so that at most `most` fit, on 1, 2 or 5 times a power of ten. */
export function ticks(durationUs: number, most: number): number[] {
  const rough = durationUs / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough) ?? rough;
  return Array.from({length: Math.floor(durationUs / step) + 1}, (_, index) => index * step);
}

function parentOf(span: JaegerSpan, traceId: string): string | undefined {
  return span.references?.find((one) => one.refType === 'CHILD_OF' && one.traceID === traceId)?.spanID;
}

function lineOf(span: JaegerSpan, trace: JaegerTrace, depth: number, startUs: number): Line {
  const process = trace.processes[span.processID];
  const tags = new Map((span.tags ?? []).map((tag) => [tag.key, tag.value]));
  const instance = process.tags?.find((tag) => tag.key === 'service.instance.id')?.value;
  return {
    id: span.spanID,
    depth,
    service: process.serviceName,
    instance: instance === undefined ? '' : String(instance),
    name: span.operationName,
    startUs: span.startTime - startUs,
    durationUs: span.duration,
    failed: tags.get('error') === true || tags.get('otel.status_code') === 'ERROR',
    tags,
  };
}
