// What a panel has where its board says nothing. In Grafana these are settings of each panel's plugin.

import type {Panel} from '../board';

const FIELD_DEFAULTS: Readonly<Record<string, any>> = {
  timeseries: {
    color: {mode: 'palette-classic'},
    custom: {
      axisPlacement: 'auto', axisGridShow: true, drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0,
      gradientMode: 'none', showPoints: 'auto', pointSize: 5, barAlignment: 0, scaleDistribution: {type: 'linear'},
      hideFrom: {legend: false, tooltip: false, viz: false}, thresholdsStyle: {mode: 'off'},
    },
  },
  stat: {color: {mode: 'thresholds'}},
  bargauge: {color: {mode: 'thresholds'}},
  table: {color: {mode: 'thresholds'}, custom: {align: 'auto', cellOptions: {type: 'auto'}}},
};

/** The panel with its plugin's defaults below what its board says. */
export function withDefaults(panel: Panel): Panel {
  const own = panel.fieldConfig?.defaults ?? {};
  const given = FIELD_DEFAULTS[panel.type] ?? {};
  const defaults = {...given, ...own, custom: {...given.custom, ...own.custom}};
  return {...panel, fieldConfig: {defaults, overrides: panel.fieldConfig?.overrides ?? []}};
}
