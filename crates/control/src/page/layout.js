"use strict";

// Places nodes in layers: hosts at the bottom, each switch above all that is below it. Pure: numbers in,
// numbers out.

const NODE_HEIGHT = 42;
const GAP = 26;
const MARGIN = 10;

// A node has `key`, `width`; an edge `upper` and `lower`, which are keys.
function layOut(nodes, edges) {
  const below = new Map(nodes.map((node) => [node.key, []]));
  const above = new Map(nodes.map((node) => [node.key, []]));
  for (const { upper, lower } of edges) {
    if (below.has(upper) && below.has(lower)) {
      below.get(upper).push(lower);
      above.get(lower).push(upper);
    }
  }
  const levels = heights(nodes, below);
  const rows = [];
  for (const node of nodes) {
    const level = levels.get(node.key);
    (rows[level] ??= []).push(node);
  }
  order(rows, above, below);
  const widths = Array.from(rows, (row) => (row ?? []).reduce((sum, node) => sum + node.width + GAP, -GAP));
  const width = Math.max(0, ...widths);
  const layer = edges.length > 0 ? 128 : NODE_HEIGHT + GAP;
  const places = new Map();
  Array.from(rows, (row, level) => {
    let x = MARGIN + (width - widths[level]) / 2;
    // Narrow rows spread over the width, so that edges do not run together.
    const count = (row ?? []).length;
    const spread = count > 1 ? Math.min(90, (width - widths[level]) / (count + 1)) : 0;
    x -= (spread * (count - 1)) / 2;
    for (const node of row ?? []) {
      const y = MARGIN + (rows.length - 1 - level) * layer;
      places.set(node.key, { x, y, width: node.width, height: NODE_HEIGHT });
      x += node.width + GAP + spread;
    }
  });
  const height = Math.max(0, rows.length - 1) * layer + NODE_HEIGHT;
  return { places, width: width + 2 * MARGIN, height: height + 2 * MARGIN };
}

// The longest way down from each node. The trees of several groups together may have circles: an edge that
// closes one counts for nothing.
function heights(nodes, below) {
  const least = new Map(nodes.map((node) => [node.key, node.level ?? 0]));
  const levels = new Map();
  const entered = new Set();
  const height = (key) => {
    entered.add(key);
    let level = least.get(key);
    for (const lower of below.get(key)) {
      // Entered and without a level: it is above this one already.
      if (!entered.has(lower)) {
        height(lower);
      }
      level = Math.max(level, (levels.get(lower) ?? -1) + 1);
    }
    levels.set(key, level);
  };
  for (const { key } of nodes) {
    if (!entered.has(key)) {
      height(key);
    }
  }
  return levels;
}

// Puts what is below next to each other, by the middle of what each is connected to.
function order(rows, above, below) {
  const sweep = (row, neighbours, others) => {
    const position = new Map((others ?? []).map((node, index) => [node.key, index]));
    const middle = (node, index) => {
      const known = neighbours.get(node.key).filter((key) => position.has(key));
      if (known.length === 0) {
        return index;
      }
      return known.reduce((sum, key) => sum + position.get(key), 0) / known.length;
    };
    const keyed = row.map((node, index) => ({ node, index, at: middle(node, index) }));
    keyed.sort((a, b) => a.at - b.at || a.index - b.index);
    keyed.forEach(({ node }, index) => (row[index] = node));
  };
  for (let round = 0; round < 4; round += 1) {
    for (let level = rows.length - 2; level >= 0; level -= 1) {
      sweep(rows[level] ?? [], above, rows[level + 1]);
    }
    for (let level = 1; level < rows.length; level += 1) {
      sweep(rows[level] ?? [], below, rows[level - 1]);
    }
  }
}
