// Tables: the library's own, sorted as the board says.

import {TableNG} from '@grafana/ui/unstable';
import React from 'react';

import type {Kind} from './kind';

export const table: Kind = ({panel, data, width, height, range}) => {
  const options = panel.options;
  return (
    <TableNG
      data={data.frames[options.frameIndex ?? 0]}
      width={width}
      height={height}
      noHeader={!options.showHeader}
      showTypeIcons={options.showTypeIcons}
      sortBy={options.sortBy ?? []}
      cellHeight={options.cellHeight}
      fieldConfig={panel.fieldConfig as any}
      noValue={panel.fieldConfig?.defaults.noValue}
      enableVirtualization={false}
      timeRange={range}
      structureRev={1}
    />
  );
};
