// What is drawn over a plot of time: exemplars as diamonds, annotations as dashed lines.

import {type GrafanaTheme2} from '@grafana/data';
import type {UPlotConfigBuilder} from '@grafana/ui';
import type uPlot from 'uplot';

import type {Exemplar} from '../exemplars';
import type {Mark} from '../marks';

const HALF_PX = 3.5;

/** `toY` turns an exemplar's value into one of the plot's y scale. */
export function addExemplars(config: UPlotConfigBuilder, exemplars: Exemplar[], yScale: string, colour: string, toY: (value: number) => number = (value) => value): void {
  config.addHook('draw', (plot: uPlot) => {
    const {ctx, bbox} = plot;
    const half = HALF_PX * devicePixelRatio;
    ctx.save();
    ctx.fillStyle = colour;
    for (const one of exemplars) {
      const x = plot.valToPos(one.timeMs, 'x', true);
      // One above the scale's end stands at it, as in Grafana.
      const y = Math.min(Math.max(plot.valToPos(toY(one.value), yScale, true), bbox.top), bbox.top + bbox.height);
      if (x < bbox.left || x > bbox.left + bbox.width) {
        continue;
      }
      ctx.beginPath();
      ctx.moveTo(x, y - half);
      ctx.lineTo(x + half, y);
      ctx.lineTo(x, y + half);
      ctx.lineTo(x - half, y);
      ctx.closePath();
      ctx.fill();
    }
    ctx.restore();
  });
}

export function addMarks(config: UPlotConfigBuilder, marks: Mark[], theme: GrafanaTheme2): void {
  if (marks.length === 0) {
    return;
  }
  config.addHook('draw', (plot: uPlot) => {
    const {ctx, bbox} = plot;
    const clip = (x: number): number => Math.min(Math.max(x, bbox.left), bbox.left + bbox.width);
    ctx.save();
    for (const mark of marks) {
      const colour = theme.visualization.getColorByName(mark.colour);
      const left = clip(plot.valToPos(mark.fromMs, 'x', true));
      const right = clip(plot.valToPos(mark.toMs, 'x', true));
      ctx.fillStyle = colour;
      ctx.strokeStyle = colour;
      ctx.globalAlpha = 0.1;
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      ctx.globalAlpha = 1;
      ctx.fillRect(left, bbox.top + bbox.height, Math.max(right - left, 2), 3 * devicePixelRatio);
      ctx.setLineDash([4, 4]);
      for (const x of right > left ? [left, right] : [left]) {
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
    }
    ctx.restore();
  });
}
