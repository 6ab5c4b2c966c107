// What a series was, over time: neighbouring equal values are one stretch. Pure.

export interface Run {
  fromMs: number;
  toMs: number;
  value: number;
}

/** A value holds until the next point, and no longer than `step`; where none is known, nothing is. */
export function runsOf(timesMs: number[], values: Array<number | null>, step: number): Run[] {
  const runs: Run[] = [];
  timesMs.forEach((time, at) => {
    const value = values[at];
    if (value === null || value === undefined || Number.isNaN(value)) {
      return;
    }
    const until = Math.min(timesMs[at + 1] ?? time + step, time + step);
    const last = runs[runs.length - 1];
    if (last !== undefined && last.value === value && last.toMs === time) {
      last.toMs = until;
    } else {
      runs.push({fromMs: time, toMs: until, value});
    }
  });
  return runs;
}
