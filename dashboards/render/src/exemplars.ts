// Exemplars: points that lead to traces, and which of many are drawn. Pure.

export interface Exemplar {
  timeMs: number;
  value: number;
  traceId: string;
  labels: Record<string, string>;
}

/** Each measurement once: two quantiles of one histogram have the same ones. */
export function distinct(exemplars: Exemplar[]): Exemplar[] {
  const seen = new Map(exemplars.map((one) => [`${one.traceId} ${one.timeMs} ${one.value}`, one]));
  return [...seen.values()];
}

/** Of each step the highest, and those below it that are two standard deviations apart. */
export function thin(exemplars: Exemplar[], step: number): Exemplar[] {
  const apart = 2 * deviation(exemplars.map((one) => one.value));
  const steps = new Map<number, Exemplar[]>();
  for (const one of exemplars) {
    const at = Math.floor(one.timeMs / step);
    steps.set(at, [...(steps.get(at) ?? []), one]);
  }
  return [...steps.values()].flatMap((members) => {
    const kept: Exemplar[] = [];
    for (const one of members.sort((a, b) => b.value - a.value)) {
      const last = kept[kept.length - 1];
      if (last === undefined || (apart > 0 && last.value - one.value >= apart)) {
        kept.push(one);
      }
    }
    return kept;
  });
}

function deviation(values: number[]): number {
  const mean = values.reduce((sum, value) => sum + value, 0) / Math.max(values.length, 1);
  const square = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return values.length > 1 ? Math.sqrt(square / (values.length - 1)) : 0;
}
