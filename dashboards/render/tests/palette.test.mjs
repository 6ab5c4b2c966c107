// Pictures in fewer colours. Run by `npm test`.

import assert from 'node:assert/strict';
import {test} from 'node:test';
import {deflateSync} from 'node:zlib';

import {decoded, reduced} from '../palette.mjs';

/** A PNG of `lines` of bytes, each of which begins with its filter; checksums are not looked at. */
function png(width, lines, {bits = 8, type = 2} = {}) {
  const chunk = (name, content) => {
    const length = Buffer.alloc(4);
    length.writeUInt32BE(content.length);
    return Buffer.concat([length, Buffer.from(name), content, Buffer.alloc(4)]);
  };
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(lines.length, 4);
  header.set([bits, type], 8);
  return Buffer.concat([
    Buffer.from('89504e470d0a1a0a', 'hex'), chunk('IHDR', header), chunk('IDAT', deflateSync(Buffer.from(lines.flat()))), chunk('IEND', Buffer.alloc(0)),
  ]);
}

test('each filter of a line is undone', () => {
  const picture = png(2, [
    [0, 1, 2, 3, 10, 20, 30],
    [1, 1, 2, 3, 9, 18, 27], // left
    [2, 0, 0, 0, 0, 0, 0], // up
    [3, 1, 1, 2, 5, 9, 14], // mean of both
    [4, 0, 0, 0, 0, 0, 0], // Paeth's
  ]);
  const {width, height, colours} = decoded(picture);
  assert.deepEqual([width, height], [2, 5]);
  assert.deepEqual([...colours].map((colour) => colour.toString(16)), Array(5).fill(['10203', 'a141e']).flat());
});

test('a picture of few colours stays as it is, without its opacity', () => {
  const picture = png(2, [[0, 1, 2, 3, 255, 200, 100, 50, 255], [0, 200, 100, 50, 255, 9, 9, 9, 255]], {type: 6});
  assert.deepEqual(decoded(reduced(picture, 256)).colours, decoded(picture).colours);
});

test('of many colours the frequent stay, and similar ones become one', () => {
  const line = [0, ...Array(50).fill([10, 10, 10]).flat(), 200, 0, 0, 202, 0, 0, 11, 10, 10];
  const colours = [...decoded(reduced(png(53, [line]), 2)).colours];
  assert.deepEqual(new Set(colours), new Set([0x0a0a0a, 0xc90000]));
  assert.deepEqual(colours.slice(50), [0xc90000, 0xc90000, 0x0a0a0a]);
});

test('checksums are right', () => {
  const made = reduced(png(1, [[0, 1, 2, 3]]), 2);
  assert.equal(made.subarray(-12).toString('hex'), '0000000049454e44ae426082'); // as every PNG ends
});

test('what cannot be read, or be made, is refused', () => {
  assert.throws(() => reduced(Buffer.from('GIF89a, and more of it'), 9), /not a PNG/);
  assert.throws(() => reduced(png(1, [[0, 0, 0, 0]], {bits: 16}), 9), /16 bits/);
  assert.throws(() => reduced(png(1, [[0, 0, 0, 0]]), 257), /2 to 256 colours, not 257/);
});
