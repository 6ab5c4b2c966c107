// The axis of time that hand-made plots share with the library's own, and an axis of names or edges.

import {type GrafanaTheme2, type TimeRange} from '@grafana/data';
import {AxisPlacement, ScaleDirection, ScaleOrientation} from '@grafana/schema';
import {UPlotConfigBuilder} from '@grafana/ui';

export const ROWS = 'rows';

/** A plot with time below; its rows are 0, 1, … from below, each 1 high. */
export function rowPlot(range: TimeRange, timeZone: string, theme: GrafanaTheme2, rows: number): UPlotConfigBuilder {
  const config = new UPlotConfigBuilder(timeZone);
  config.addScale({
    scaleKey: 'x', isTime: true, orientation: ScaleOrientation.Horizontal, direction: ScaleDirection.Right,
    range: () => [range.from.valueOf(), range.to.valueOf()],
  });
  config.addAxis({scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone, theme});
  config.addScale({
    scaleKey: ROWS, isTime: false, orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up,
    range: () => [0, rows],
  });
  config.addSeries({scaleKey: ROWS, theme, show: true, pathBuilder: () => null, pointsBuilder: () => false} as any);
  config.setCursor({show: false});
  config.setPadding([8, 24, 0, null]); // the last time stands half outside
  return config;
}
