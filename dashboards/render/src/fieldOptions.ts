// The registry of field settings that `applyFieldOverrides` works with. Grafana's own is part of its
// server's front end and not published; a plain one is enough, as nothing is edited here.

import {Registry, type FieldConfigOptionsRegistry} from '@grafana/data';

const STANDARD = [
  'unit', 'min', 'max', 'fieldMinMax', 'decimals', 'displayName', 'noValue', 'color', 'thresholds', 'mappings', 'links',
  'actions', 'filterable',
];
const CUSTOM = [
  'drawStyle', 'lineInterpolation', 'lineWidth', 'fillOpacity', 'gradientMode', 'lineStyle', 'stacking', 'showPoints',
  'pointSize', 'spanNulls', 'axisPlacement', 'axisLabel', 'axisSoftMin', 'axisSoftMax', 'scaleDistribution', 'hideFrom',
  'thresholdsStyle', 'barAlignment', 'cellOptions', 'align', 'width', 'minWidth', 'inspect', 'hidden', 'transform',
  'lineColor', 'fillColor', 'axisColorMode', 'axisBorderShow', 'axisGridShow', 'axisCenteredZero',
];

const item = (id: string, path: string, isCustom: boolean): any => ({
  id,
  path,
  name: id,
  isCustom,
  process: (value: unknown) => value,
  shouldApply: () => true,
  override: () => null,
  editor: () => null,
  getItemsCount: () => 0,
});

export const KNOWN_OPTIONS: ReadonlySet<string> = new Set([...STANDARD, ...CUSTOM.map((id) => `custom.${id}`)]);

export const fieldOptions = new Registry<any>(() => [
  ...STANDARD.map((id) => item(id, id, false)),
  ...CUSTOM.map((id) => item(`custom.${id}`, id, true)),
]) as unknown as FieldConfigOptionsRegistry;
