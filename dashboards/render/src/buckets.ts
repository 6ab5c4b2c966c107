// Cumulative histogram buckets over time, as a heatmap needs them: one row for each bucket. Pure.

export interface BucketSeries {
  le: string;
  timesMs: number[];
  values: Array<number | null>;
}

export interface Rows {
  /** Upper edges, ascending; the last may be Infinity. */
  edges: number[];
  timesMs: number[];
  /** By row and time: what fell between two edges; null where nothing is known. */
  counts: Array<Array<number | null>>;
}

export function edgeOf(le: string): number {
  return le === '+Inf' ? Infinity : Number(le);
}

/** Differences of neighbours. Counters of different ages may differ by less than nothing: 0 then. */
export function rowsOf(series: BucketSeries[]): Rows {
  const sorted = [...series].sort((a, b) => edgeOf(a.le) - edgeOf(b.le));
  const timesMs = [...new Set(sorted.flatMap((one) => one.timesMs))].sort((a, b) => a - b);
  const cumulative = sorted.map((one) => {
    const at = new Map(one.timesMs.map((time, index) => [time, one.values[index]]));
    return timesMs.map((time) => at.get(time) ?? null);
  });
  const counts = cumulative.map((row, index) =>
    row.map((value, at) => {
      const below = index === 0 ? 0 : cumulative[index - 1][at];
      return value === null || below === null ? null : Math.max(0, value - below);
    }),
  );
  return {edges: sorted.map((one) => edgeOf(one.le)), timesMs, counts};
}

/** The row that a measurement falls in. */
export function rowFor(value: number, edges: number[]): number {
  const row = edges.findIndex((edge) => value <= edge);
  return row < 0 ? edges.length - 1 : row;
}
