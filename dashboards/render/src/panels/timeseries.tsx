// Lines, areas and bars over time: the library's own plot, with exemplars and annotations over it.

import {type UPlotConfigBuilder, TimeSeries} from '@grafana/ui';
import React from 'react';

import {thin} from '../exemplars';
import type {Drawing, Kind} from './kind';
import {addExemplars, addMarks} from './overlay';

const EXEMPLAR_COLOUR = {dark: '#8AB8FF', light: '#1F60C4'};

export const timeseries: Kind = (drawing) => {
  const {data, width, height, range, timeZone, panel} = drawing;
  const done = new WeakSet<UPlotConfigBuilder>();
  return (
    <TimeSeries
      frames={data.frames}
      width={width}
      height={height}
      timeRange={range}
      timeZone={timeZone}
      legend={panel.options.legend}
      options={panel.options}
    >
      {(config: UPlotConfigBuilder) => {
        if (!done.has(config)) {
          done.add(config);
          decorate(config, drawing);
        }
        return null;
      }}
    </TimeSeries>
  );
};

function decorate(config: UPlotConfigBuilder, {data, theme, marks}: Drawing): void {
  addMarks(config, marks, theme);
  const yScale = config.scales.map((scale) => scale.props.scaleKey).find((key) => key !== 'x');
  if (yScale !== undefined && data.exemplars.length > 0) {
    const colour = theme.isDark ? EXEMPLAR_COLOUR.dark : EXEMPLAR_COLOUR.light;
    addExemplars(config, thin(data.exemplars, 2 * data.stepMs), yScale, colour);
  }
}
