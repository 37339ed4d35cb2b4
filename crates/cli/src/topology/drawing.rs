//! The drawing of a machine: NUMA nodes, host bridges, switches, GPUs and NICs, and a table of
//! distances.

use millstream_topology::{Crossing, Nic, Topology};

use super::distances::{DistanceTable, Row, meaning, word};
use super::svg::{Anchor, Area, Paint, Picture, Style};
use super::tree::{Item, Kind, Leaf, Machine, Node, machine};
use crate::units;

const MARGIN: u32 = 24;
const GAP: u32 = 10;
/// Where host bridges of a node begin a new row.
const WIDTH: u32 = 1560;
const LEAF_WIDTH: u32 = 124;
const LEAF_HEIGHT: u32 = 62;
/// Of host bridges and switches.
const BAR_HEIGHT: u32 = 24;
/// Between a bar and what is below it.
const DROP: u32 = 14;
const NODE_HEADER: u32 = 34;

const CELL_WIDTH: u32 = 66;
const CELL_HEIGHT: u32 = 24;
const LOCATION_WIDTH: u32 = 110;
/// Rows and columns of the table that are drawn.
const CELLS_MAX: usize = 64;

const NODE: Paint = Paint { fill: "#f6f7f9", border: "#c3c9d2" };
const BRIDGE: Paint = Paint { fill: "#e4e7ec", border: "#a5aebb" };
const SWITCH: Paint = Paint { fill: "#fdf0d5", border: "#d9a441" };
const GPU: Paint = Paint { fill: "#dff2e1", border: "#4f9d5b" };
const NIC: Paint = Paint { fill: "#dbe9fb", border: "#4a80c4" };
const INTERFACE: Paint = Paint { fill: "#ffffff", border: "#a5aebb" };
const UNKNOWN: Paint = Paint { fill: "#ffffff", border: "#dfe3e8" };

/// Draws the machine, with these as its NICs.
pub(super) fn svg(topology: &Topology, nics: &[Nic], distances: &DistanceTable) -> String {
    let Machine { nodes, left_out } = machine(topology, nics);
    let mut picture = Picture::default();
    let mut y = MARGIN + 18;
    picture.text((MARGIN, y), WIDTH, "Topology", Style::Title, Anchor::Start);
    y = legend(&mut picture, y + 16);
    let mut width = WIDTH;
    for (number, node) in &nodes {
        let title = node_title(topology, *number);
        let drawn = draw_node(&mut picture, y, &title, node);
        width = width.max(drawn.width);
        y += drawn.height + GAP;
    }
    if left_out > 0 {
        let text = format!("{left_out} more devices are not drawn");
        picture.text((MARGIN, y + 14), WIDTH, &text, Style::Plain, Anchor::Start);
        y += BAR_HEIGHT;
    }
    let table = draw_table(&mut picture, y + GAP, distances);
    width = width.max(table.width);
    y += GAP + table.height;
    picture.finish("Topology of a machine", width + 2 * MARGIN, y + MARGIN)
}

fn legend(picture: &mut Picture, y: u32) -> u32 {
    let kinds = [
        (BRIDGE, "PCI host bridge"),
        (SWITCH, "PCI switch or bridge"),
        (GPU, "GPU"),
        (NIC, "NIC for transfers"),
        (INTERFACE, "network interface"),
    ];
    for (index, (paint, text)) in (0..).zip(kinds) {
        let x = MARGIN + index * 160;
        picture.rectangle(Area { x, y, width: 16, height: 16 }, paint, "");
        picture.text((x + 22, y + 12), 136, text, Style::Small, Anchor::Start);
    }
    y + 16 + 2 * GAP
}

fn node_title(topology: &Topology, number: Option<u32>) -> String {
    let Some(number) = number else { return "NUMA node unknown".to_owned() };
    let node = topology.numa_nodes.iter().find(|node| node.number == number);
    let processors = node.and_then(|node| node.processors.as_ref());
    let processors = processors.map_or(String::new(), |list| format!(" \u{b7} processors {list}"));
    let memory = node.and_then(|node| node.memory);
    let memory = memory.map_or(String::new(), |it| format!(" \u{b7} {}", units::readable(it)));
    format!("NUMA node {number}{processors}{memory}")
}

/// Draws a node with its top at `y`; returns what it takes.
fn draw_node(picture: &mut Picture, y: u32, title: &str, node: &Node) -> Area {
    let bridges: Vec<(Area, Block<'_>)> = place(node, y + NODE_HEADER);
    let right = bridges.iter().map(|(area, _)| area.x + area.width).max().unwrap_or(0);
    let bottom = bridges.iter().map(|(area, _)| area.y + area.height).max();
    let bottom = bottom.unwrap_or(y + NODE_HEADER - GAP);
    let width = (right + GAP).saturating_sub(MARGIN).max(WIDTH);
    let area = Area { x: MARGIN, y, width, height: bottom + GAP - y };
    picture.rectangle(area, NODE, title);
    picture.text((MARGIN + GAP, y + 22), width - 2 * GAP, title, Style::Strong, Anchor::Start);
    for (area, block) in bridges {
        match block {
            Block::HostBridge(root, items) => {
                let name = root.trim_start_matches("pci");
                bar(picture, area, BRIDGE, "host bridge", name);
                draw_items(picture, (area.x, area.y + BAR_HEIGHT), items);
            }
            Block::Other(leaf) => draw_leaf(picture, (area.x, area.y), leaf),
        }
    }
    area
}

/// What stands in a node beside others.
enum Block<'a> {
    HostBridge(&'a str, &'a [Item]),
    Other(&'a Leaf),
}

/// Puts blocks beside each other, in rows.
fn place(node: &Node, top: u32) -> Vec<(Area, Block<'_>)> {
    let bridges = node.host_bridges.iter();
    let bridges = bridges.map(|(root, items)| {
        let size = (items_width(items), BAR_HEIGHT + items_height(items));
        (size, Block::HostBridge(root, items))
    });
    let others = node.others.iter().map(|leaf| ((LEAF_WIDTH, LEAF_HEIGHT), Block::Other(leaf)));
    let (mut x, mut y, mut row_height) = (MARGIN + GAP, top, 0);
    let mut placed = Vec::new();
    for ((width, height), block) in bridges.chain(others) {
        if x > MARGIN + GAP && x + width + GAP > MARGIN + WIDTH {
            (x, y, row_height) = (MARGIN + GAP, y + row_height + 2 * GAP, 0);
        }
        placed.push((Area { x, y, width, height }, block));
        x += width + 2 * GAP;
        row_height = row_height.max(height);
    }
    placed
}

fn items_width(items: &[Item]) -> u32 {
    let gaps = GAP * (items.len() as u32).saturating_sub(1);
    items.iter().map(item_width).sum::<u32>() + gaps
}

fn item_width(item: &Item) -> u32 {
    match item {
        Item::Leaf(_) => LEAF_WIDTH,
        Item::Switch(_, items) => items_width(items).max(LEAF_WIDTH),
    }
}

fn items_height(items: &[Item]) -> u32 {
    let height = |item: &Item| match item {
        Item::Leaf(_) => LEAF_HEIGHT,
        Item::Switch(_, items) => BAR_HEIGHT + items_height(items),
    };
    DROP + items.iter().map(height).max().unwrap_or(0)
}

/// Draws items below a bar whose lower left corner this is.
fn draw_items(picture: &mut Picture, (mut x, top): (u32, u32), items: &[Item]) {
    for item in items {
        let width = item_width(item);
        let y = top + DROP;
        picture.vertical(x + width / 2, top, y);
        match item {
            Item::Leaf(leaf) => draw_leaf(picture, (x, y), leaf),
            Item::Switch(address, items) => {
                let area = Area { x, y, width, height: BAR_HEIGHT };
                bar(picture, area, SWITCH, "switch", &address.to_string());
                draw_items(picture, (x, y + BAR_HEIGHT), items);
            }
        }
        x += width + GAP;
    }
}

/// A bar at the top of an area: what it is, where that fits, and its name.
fn bar(picture: &mut Picture, area: Area, paint: Paint, what: &str, name: &str) {
    let area = Area { height: BAR_HEIGHT, ..area };
    let text = format!("{what} {name}");
    let shown = if area.width > LEAF_WIDTH { &text } else { name };
    picture.rectangle(area, paint, &text);
    let at = (area.x + area.width / 2, area.y + 16);
    picture.text(at, area.width - 8, shown, Style::Plain, Anchor::Middle);
}

fn draw_leaf(picture: &mut Picture, (x, y): (u32, u32), leaf: &Leaf) {
    let Leaf { kind, name, detail, address } = leaf;
    let (paint, what) = match kind {
        Kind::Gpu => (GPU, "GPU"),
        Kind::Nic => (NIC, "NIC"),
        Kind::Interface => (INTERFACE, "network interface"),
    };
    let address = address.map_or("not on PCI".to_owned(), |address| address.to_string());
    let area = Area { x, y, width: LEAF_WIDTH, height: LEAF_HEIGHT };
    picture.rectangle(area, paint, &format!("{what} {name}, {detail}, {address}"));
    let (middle, width) = (x + LEAF_WIDTH / 2, LEAF_WIDTH - 8);
    picture.text((middle, y + 20), width, name, Style::Strong, Anchor::Middle);
    picture.text((middle, y + 37), width, detail, Style::Small, Anchor::Middle);
    picture.text((middle, y + 53), width, &address, Style::Small, Anchor::Middle);
}

/// The colour of a distance: the nearer, the stronger.
fn paint(crossing: Option<Crossing>) -> Paint {
    let fill = match crossing {
        Some(Crossing::Pix) => "#7cc48a",
        Some(Crossing::Pxb) => "#a9d9ae",
        Some(Crossing::Phb) => "#d3ebcf",
        Some(Crossing::Node) => "#fbf3cf",
        Some(Crossing::Sys) => "#f6d9cf",
        None => return UNKNOWN,
    };
    Paint { fill, border: "#ffffff" }
}

fn draw_table(picture: &mut Picture, y: u32, distances: &DistanceTable) -> Area {
    let DistanceTable { nics, rows } = distances;
    let mut area = Area { x: MARGIN, y, width: 0, height: 0 };
    if nics.is_empty() || rows.is_empty() {
        return area;
    }
    let left = MARGIN + LOCATION_WIDTH;
    let at = |column: u32| left + column * CELL_WIDTH + CELL_WIDTH / 2;
    picture.text((MARGIN, y + 16), LOCATION_WIDTH, "Distances", Style::Strong, Anchor::Start);
    for (column, nic) in (0..).zip(nics.iter().take(CELLS_MAX)) {
        picture.text((at(column), y + 16), CELL_WIDTH - 2, nic, Style::Small, Anchor::Middle);
    }
    let mut y = y + CELL_HEIGHT;
    for Row { location, crossings } in rows.iter().take(CELLS_MAX) {
        let width = LOCATION_WIDTH - GAP;
        picture.text((MARGIN, y + 16), width, location, Style::Plain, Anchor::Start);
        for ((column, crossing), nic) in (0..).zip(crossings).zip(nics).take(CELLS_MAX) {
            let x = left + column * CELL_WIDTH;
            let cell = Area { x, y, width: CELL_WIDTH, height: CELL_HEIGHT };
            let tip = format!("{location} to {nic}: {}", tip(*crossing));
            picture.rectangle(cell, paint(*crossing), &tip);
            let text = word(*crossing);
            picture.text((at(column), y + 16), CELL_WIDTH, text, Style::Plain, Anchor::Middle);
        }
        y += CELL_HEIGHT;
    }
    for (what, count) in [("locations", rows.len()), ("NICs", nics.len())] {
        if let Some(more) = count.checked_sub(CELLS_MAX).filter(|more| *more > 0) {
            let text = format!("{more} more {what} are not in the table");
            picture.text((MARGIN, y + 16), WIDTH, &text, Style::Plain, Anchor::Start);
            y += CELL_HEIGHT;
        }
    }
    y += GAP;
    for (index, crossing) in (0..).zip(Crossing::ALL) {
        let x = MARGIN + index * 210;
        let cell = Area { x, y, width: 44, height: 20 };
        picture.rectangle(cell, paint(Some(crossing)), "");
        picture.text((x + 22, y + 14), 44, crossing.name(), Style::Small, Anchor::Middle);
        picture.text((x + 52, y + 14), 158, meaning(crossing), Style::Small, Anchor::Start);
    }
    area.width = LOCATION_WIDTH + nics.len().min(CELLS_MAX) as u32 * CELL_WIDTH;
    area.height = y + 20 - area.y;
    area
}

fn tip(crossing: Option<Crossing>) -> &'static str {
    crossing.map_or("unknown", meaning)
}
