// Panels of single values: numbers with a line behind them, and bars.

import {type FieldDisplay, getDisplayValueAlignmentFactors, getFieldDisplayValues, VizOrientation} from '@grafana/data';
import {BarGauge, BigValue, BigValueTextMode, VizRepeater, type VizRepeaterRenderValueProps} from '@grafana/ui';
import React from 'react';

import type {Drawing, Kind} from './kind';

export const stat: Kind = (drawing) => {
  const {panel, theme} = drawing;
  const options = panel.options;
  return (
    <Repeated
      drawing={drawing}
      draw={({value, width, height, count, alignmentFactors}) => (
        <BigValue
          value={value.display}
          count={count}
          sparkline={options.graphMode === 'none' || !known(value) ? undefined : value.sparkline}
          width={width}
          height={height}
          theme={theme}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={count > 1 ? options.textMode : BigValueTextMode.Value}
          alignmentFactors={alignmentFactors}
        />
      )}
    />
  );
};

export const bargauge: Kind = (drawing) => {
  const {panel, theme} = drawing;
  const options = panel.options;
  return (
    <Repeated
      drawing={drawing}
      draw={({value, width, height, orientation, alignmentFactors}) => (
        <BarGauge
          value={value.display}
          width={width}
          height={height}
          theme={theme}
          field={value.field}
          orientation={orientation}
          display={value.view?.getFieldDisplayProcessor(value.colIndex!)}
          text={options.text}
          itemSpacing={SPACING_PX}
          lcdCellWidth={8}
          displayMode={options.displayMode}
          showUnfilled={options.showUnfilled}
          valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement}
          alignmentFactors={alignmentFactors}
        />
      )}
    />
  );
};

const SPACING_PX = 8;

function known(value: FieldDisplay): boolean {
  return Number.isFinite(value.display.numeric);
}

type Draw = (one: VizRepeaterRenderValueProps<FieldDisplay, any>) => React.JSX.Element;

function Repeated({drawing, draw}: {drawing: Drawing; draw: Draw}): React.JSX.Element {
  const {panel, data, width, height, theme, timeZone} = drawing;
  const options = panel.options;
  const values = (): FieldDisplay[] =>
    getFieldDisplayValues({
      fieldConfig: panel.fieldConfig as any,
      reduceOptions: options.reduceOptions,
      replaceVariables: data.replace as any,
      theme,
      data: data.frames,
      sparkline: panel.type === 'stat',
      timeZone,
    });
  return (
    <VizRepeater<FieldDisplay, any>
      source={data}
      getValues={values}
      getAlignmentFactors={(all) => getDisplayValueAlignmentFactors(all)}
      renderValue={draw}
      width={width}
      height={height}
      renderCounter={0}
      itemSpacing={SPACING_PX}
      orientation={options.orientation ?? VizOrientation.Auto}
      minVizWidth={options.minVizWidth}
      minVizHeight={options.minVizHeight}
      maxVizHeight={options.maxVizHeight}
      autoGrid
    />
  );
}
