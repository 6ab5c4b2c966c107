// What each series was, over time. The library has no such panel; it is drawn on the library's plot
// and with its legend.

import {type DataFrame, formattedValueToString, getDisplayProcessor, getFieldDisplayName} from '@grafana/data';
import {LegendDisplayMode} from '@grafana/schema';
import {UPlotChart, VizLayout, VizLegend, type VizLegendItem} from '@grafana/ui';
import React, {useMemo} from 'react';
import type uPlot from 'uplot';

import {type Run, runsOf} from '../runs';
import type {Drawing, Kind} from './kind';
import {addMarks} from './overlay';
import {ROWS, rowPlot} from './timeAxis';

interface Row {
  name: string;
  runs: Array<Run & {text: string; colour: string}>;
}

export const stateTimeline: Kind = (drawing) => <StateTimeline {...drawing} />;

function StateTimeline(drawing: Drawing): React.JSX.Element {
  const {panel, width, height} = drawing;
  const rows = useMemo(() => rowsOf(drawing), [drawing.data]);
  const legend = panel.options.legend;
  const items = legendOf(rows);
  return (
    <VizLayout
      width={width}
      height={height}
      legend={
        legend.showLegend ? (
          <VizLayout.Legend placement={legend.placement}>
            <VizLegend placement={legend.placement} items={items} displayMode={LegendDisplayMode.List} />
          </VizLayout.Legend>
        ) : null
      }
    >
      {(innerWidth: number, innerHeight: number) => <Plot drawing={drawing} rows={rows} width={innerWidth} height={innerHeight} />}
    </VizLayout>
  );
}

function Plot({drawing, rows, width, height}: {drawing: Drawing; rows: Row[]; width: number; height: number}): React.JSX.Element {
  const {panel, range, timeZone, theme, marks} = drawing;
  const config = useMemo(() => {
    const plot = rowPlot(range, timeZone, theme, rows.length);
    const middle = (row: number): number => rows.length - row - 0.5; // the first is on top
    plot.addAxis({
      scaleKey: ROWS, theme, grid: {show: false},
      splits: () => rows.map((_, row) => middle(row)),
      values: (_, splits) => splits.map((at) => rows[rows.length - Math.ceil(at)].name),
    });
    plot.addHook('drawAxes', (u: uPlot) => {
      const half = panel.options.rowHeight / 2;
      rows.forEach((row, index) => row.runs.forEach((run) => {
        const left = Math.max(u.valToPos(run.fromMs, 'x', true), u.bbox.left);
        const right = Math.min(u.valToPos(run.toMs, 'x', true), u.bbox.left + u.bbox.width);
        const top = u.valToPos(middle(index) + half, ROWS, true);
        const bottom = u.valToPos(middle(index) - half, ROWS, true);
        u.ctx.fillStyle = run.colour;
        u.ctx.globalAlpha = (panel.fieldConfig?.defaults.custom?.fillOpacity ?? 70) / 100;
        u.ctx.fillRect(left, top, Math.max(right - left, 1), bottom - top);
        u.ctx.globalAlpha = 1;
      }));
    });
    addMarks(plot, marks, theme);
    return plot;
  }, [rows, width, height]);
  const times = [range.from.valueOf(), range.to.valueOf()];
  return <UPlotChart config={config} data={[times, [null, null]] as any} width={width} height={height} />;
}

function rowsOf({data, theme, timeZone}: Drawing): Row[] {
  return data.frames.map((frame: DataFrame) => {
    const [times, field] = frame.fields;
    const display = field.display ?? getDisplayProcessor({field, theme, timeZone});
    const runs = runsOf(times.values, field.values, data.stepMs).map((run) => {
      const shown = display(run.value);
      return {...run, text: formattedValueToString(shown), colour: shown.color ?? theme.colors.text.secondary};
    });
    return {name: getFieldDisplayName(field, frame, data.frames), runs};
  });
}

function legendOf(rows: Row[]): VizLegendItem[] {
  const seen = new Map(rows.flatMap((row) => row.runs).map((run) => [run.text, run.colour]));
  return [...seen].map(([label, color]) => ({label, color, yAxis: 1}));
}
