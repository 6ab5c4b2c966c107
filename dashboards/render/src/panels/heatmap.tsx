// Histograms over time: one row of cells for each bucket, coloured by what fell into it. The library
// has no such panel; it is drawn on the library's plot, so that its axes look like the others.

import {type DataFrame, formattedValueToString, getValueFormat, type GrafanaTheme2} from '@grafana/data';
import {UPlotChart} from '@grafana/ui';
import * as chromatic from 'd3-scale-chromatic';
import React, {useMemo} from 'react';
import type uPlot from 'uplot';

import {rowFor, type Rows, rowsOf} from '../buckets';
import type {Drawing, Kind} from './kind';
import {addExemplars, addMarks} from './overlay';
import {ROWS, rowPlot} from './timeAxis';
import {thin} from '../exemplars';

const LEGEND_PX = 34;

export const heatmap: Kind = (drawing) => <Heatmap {...drawing} />;

function Heatmap(drawing: Drawing): React.JSX.Element {
  const {panel, data, width, height, range, timeZone, theme, marks} = drawing;
  const options = panel.options;
  const rows = useMemo(() => rowsOf(data.frames.map(bucket)), [data]);
  const palette = useMemo(() => paletteOf(options.color, theme), [options, theme]);
  const highest = Math.max(...rows.counts.flat().map((count) => count ?? 0), 0);
  const lowest = options.filterValues?.le ?? 0;
  const shade = (count: number): string => {
    const share = highest > 0 ? count / highest : 0;
    const scaled = options.color.scale === 'exponential' ? share ** options.color.exponent : share;
    return palette[Math.min(Math.floor(scaled * palette.length), palette.length - 1)];
  };
  const config = useMemo(() => {
    const plot = rowPlot(range, timeZone, theme, rows.edges.length);
    const format = getValueFormat(options.yAxis?.unit ?? panel.fieldConfig?.defaults.unit ?? 'short');
    plot.addAxis({
      scaleKey: ROWS, theme, grid: {show: false},
      splits: () => everyNth(rows.edges.length, height),
      values: (_, splits) => splits.map((row) => edgeText(rows.edges[row - 1], format)),
    });
    plot.addHook('drawAxes', (u: uPlot) => cells(u, rows, data.stepMs, options.cellGap ?? 1, (count) => (count > lowest ? shade(count) : null)));
    addMarks(plot, marks, theme);
    const toRow = (value: number): number => rowFor(value, rows.edges) + 0.5;
    addExemplars(plot, thin(data.exemplars, 2 * data.stepMs), ROWS, options.exemplars.color, toRow);
    return plot;
  }, [rows, palette]);
  const cell = getValueFormat(options.cellValues?.unit ?? 'short');
  return (
    <div>
      <UPlotChart config={config} data={[rows.timesMs, rows.timesMs.map(() => null)] as any} width={width} height={height - LEGEND_PX} />
      <div style={{display: 'flex', alignItems: 'center', gap: 8, padding: '8px 8px 0 60px', fontSize: 12, color: theme.colors.text.secondary}}>
        <span>{formattedValueToString(cell(0))}</span>
        <span style={{width: 200, height: 10, background: `linear-gradient(to right, ${palette.join(',')})`}} />
        <span>{formattedValueToString(cell(highest))}</span>
      </div>
    </div>
  );
}

function cells(plot: uPlot, rows: Rows, stepMs: number, gap: number, colour: (count: number) => string | null): void {
  const {ctx} = plot;
  const space = gap * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  ctx.clip();
  rows.counts.forEach((counts, row) => {
    const top = plot.valToPos(row + 1, ROWS, true);
    const bottom = plot.valToPos(row, ROWS, true);
    counts.forEach((count, at) => {
      const fill = count === null ? null : colour(count);
      if (fill === null) {
        return;
      }
      const left = plot.valToPos(rows.timesMs[at] - stepMs, 'x', true);
      const right = plot.valToPos(rows.timesMs[at], 'x', true);
      ctx.fillStyle = fill;
      ctx.fillRect(left, top, Math.max(right - left - space, 1), Math.max(bottom - top - space, 1));
    });
  });
  ctx.restore();
}

function bucket(frame: DataFrame): {le: string; timesMs: number[]; values: Array<number | null>} {
  const [times, value] = frame.fields;
  const le = value.labels?.le;
  if (le === undefined) {
    throw new Error('a heatmap needs series by le');
  }
  return {le, timesMs: times.values, values: value.values};
}

/** Colours from little to much; Grafana turns schemes that begin with white round on dark ground. */
function paletteOf(color: {scheme: string; steps: number; reverse: boolean}, theme: GrafanaTheme2): string[] {
  const interpolate = (chromatic as any)[`interpolate${color.scheme}`];
  if (interpolate === undefined) {
    throw new Error(`no colour scheme ${color.scheme}`);
  }
  const colours = Array.from({length: color.steps}, (_, at) => interpolate(at / (color.steps - 1)) as string);
  return theme.isDark !== color.reverse ? colours.reverse() : colours;
}

function everyNth(rows: number, height: number): number[] {
  const nth = Math.max(1, Math.ceil(rows / Math.max(1, (height - LEGEND_PX) / 22)));
  return Array.from({length: Math.floor(rows / nth)}, (_, index) => (index + 1) * nth);
}

function edgeText(edge: number, format: ReturnType<typeof getValueFormat>): string {
  return edge === Infinity ? '+Inf' : formattedValueToString(format(edge));
}
