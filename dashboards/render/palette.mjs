// A PNG in fewer colours, a third of its size. Knows the PNGs that Chromium writes (8 bits a channel, not
// interlaced) and no others.
//
// Boxes of similar colours are split, the one with most error first, until there are enough of them.

import {deflateSync, inflateSync} from 'node:zlib';

const SIGNATURE = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
const CHANNELS = {2: 3, 6: 4};
const MOST = 256;
const CRC = Uint32Array.from({length: 256}, (_, byte) => {
  let sum = byte;
  for (let bit = 0; bit < 8; bit++) {
    sum = sum & 1 ? 0xedb88320 ^ (sum >>> 1) : sum >>> 1;
  }
  return sum;
});

/** The same picture, opaque, in `most` colours at most; 256 is the most that a palette holds. */
export function reduced(png, most) {
  if (!(most >= 2 && most <= MOST)) {
    throw new Error(`a palette has 2 to ${MOST} colours, not ${most}`);
  }
  const {width, height, colours} = decoded(png);
  const {palette, indexOf} = paletteOf(colours, most);
  const lines = Buffer.alloc((width + 1) * height); // each begins with its filter: none
  colours.forEach((colour, at) => {
    lines[at + Math.floor(at / width) + 1] = indexOf.get(colour);
  });
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(height, 4);
  header.set([8, 3], 8); // bits, palette
  return Buffer.concat([
    SIGNATURE, chunk('IHDR', header), chunk('PLTE', Buffer.from(palette.flatMap(parts))),
    chunk('IDAT', deflateSync(lines, {level: 9, memLevel: 9})), chunk('IEND', Buffer.alloc(0)),
  ]);
}

/** Width, height, and a number 0xRRGGBB for each pixel. */
export function decoded(png) {
  if (!png.subarray(0, 8).equals(SIGNATURE)) {
    throw new Error('not a PNG');
  }
  const data = [];
  let header;
  let palette;
  for (let at = 8; at < png.length;) {
    const length = png.readUInt32BE(at);
    const content = png.subarray(at + 8, at + 8 + length);
    const type = png.toString('latin1', at + 4, at + 8);
    if (type === 'IHDR') {
      header = content;
    } else if (type === 'PLTE') {
      palette = content;
    } else if (type === 'IDAT') {
      data.push(content);
    }
    at += 12 + length;
  }
  const [bits, type, , , interlaced] = header.subarray(8);
  const channels = palette ? 1 : CHANNELS[type];
  if (bits !== 8 || channels === undefined || interlaced) {
    throw new Error(`a PNG of ${bits} bits, type ${type}, interlacing ${interlaced} is not known here`);
  }
  const [width, height] = [header.readUInt32BE(0), header.readUInt32BE(4)];
  const bytes = unfiltered(inflateSync(Buffer.concat(data)), width * channels, height, channels);
  const colours = new Uint32Array(width * height);
  for (let at = 0; at < colours.length; at++) {
    const from = palette ? 3 * bytes[at] : at * channels;
    const [red, green, blue] = (palette ?? bytes).subarray(from, from + 3);
    colours[at] = (red << 16) | (green << 8) | blue;
  }
  return {width, height, colours};
}

function unfiltered(filtered, lineBytes, height, pixelBytes) {
  const out = Buffer.alloc(lineBytes * height);
  for (let y = 0; y < height; y++) {
    const filter = filtered[y * (lineBytes + 1)];
    for (let x = 0; x < lineBytes; x++) {
      const at = y * lineBytes + x;
      const left = x >= pixelBytes ? out[at - pixelBytes] : 0;
      const up = y > 0 ? out[at - lineBytes] : 0;
      const corner = x >= pixelBytes && y > 0 ? out[at - lineBytes - pixelBytes] : 0;
      const guess = [0, left, up, (left + up) >> 1, filter === 4 ? nearest(left, up, corner) : 0][filter];
      out[at] = filtered[y * (lineBytes + 1) + 1 + x] + guess;
    }
  }
  return out;
}

/** Paeth's guess: which of the three is nearest to left + up - corner. */
function nearest(left, up, corner) {
  const [byLeft, byUp, byCorner] = [Math.abs(up - corner), Math.abs(left - corner), Math.abs(left + up - 2 * corner)];
  return byLeft <= byUp && byLeft <= byCorner ? left : byUp <= byCorner ? up : corner;
}

/** A colour for each box of similar ones, and the box of each colour. */
function paletteOf(colours, most) {
  const counts = new Map();
  for (const colour of colours) {
    counts.set(colour, (counts.get(colour) ?? 0) + 1);
  }
  const boxes = [boxOf([...counts].map(([colour, count]) => ({colour, count, channels: parts(colour)})))];
  while (boxes.length < most) {
    const worst = boxes.reduce((one, other) => (other.error > one.error ? other : one));
    if (worst.error === 0) {
      break;
    }
    const below = worst.members.filter(({channels}) => channels[worst.widest] < worst.mean[worst.widest]);
    const above = worst.members.filter(({channels}) => channels[worst.widest] >= worst.mean[worst.widest]);
    boxes.splice(boxes.indexOf(worst), 1, boxOf(below), boxOf(above));
  }
  const indexOf = new Map(boxes.flatMap(({members}, index) => members.map(({colour}) => [colour, index])));
  return {palette: boxes.map(standIn), indexOf};
}

function boxOf(members) {
  const weight = members.reduce((sum, {count}) => sum + count, 0);
  const mean = [0, 1, 2].map((channel) => members.reduce((sum, one) => sum + one.count * one.channels[channel], 0) / weight);
  const errors = [0, 1, 2].map((channel) => members.reduce((sum, one) => sum + one.count * (one.channels[channel] - mean[channel]) ** 2, 0));
  const error = members.length > 1 ? Math.max(...errors) : 0;
  return {members, mean, error, weight, widest: errors.indexOf(Math.max(...errors))};
}

/** What most of a box has, as a background does, stays as it is. */
function standIn({members, mean, weight}) {
  const first = members.reduce((one, other) => (other.count > one.count ? other : one));
  const [red, green, blue] = first.count > weight / 2 ? first.channels : mean.map(Math.round);
  return (red << 16) | (green << 8) | blue;
}

function parts(colour) {
  return [colour >> 16, (colour >> 8) & 255, colour & 255];
}

function chunk(type, content) {
  const named = Buffer.concat([Buffer.from(type, 'latin1'), content]);
  const [length, sum] = [Buffer.alloc(4), Buffer.alloc(4)];
  length.writeUInt32BE(content.length);
  sum.writeUInt32BE(~named.reduce((crc, byte) => CRC[(crc ^ byte) & 255] ^ (crc >>> 8), -1) >>> 0);
  return Buffer.concat([length, named, sum]);
}
