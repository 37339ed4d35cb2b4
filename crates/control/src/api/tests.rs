//! What is served, held against `openapi.json`.

use millstream_inc::CommunicatorOptions;
use millstream_inc::controller::{ConnectionId, Controller, ControllerConfig, Output};
use millstream_inc::plan::FanIn;
use millstream_inc::protocol::{
    FallbackOffer, FromController, Hello, PortCounters, Presence, SwitchEdge, SwitchLimits,
    SwitchUplink, ToController,
};
use millstream_roce::Instant;
use millstream_wire::{Mtu, Psn, Qpn};
use serde_json::{Value, json};

use super::*;
use crate::topology_file::TopologyFile;

const HOSTILE: &str = "<img src=x onerror=\"alert(1)\"> & %2f";

/// A controller whose switches and hosts do what they are told.
struct Lab {
    controller: Controller,
    view: Arc<ControllerView>,
    next_qpn: u32,
    at_ns: u64,
}

impl Lab {
    fn new(config: ControllerConfig) -> Self {
        let view = Arc::new(ControllerView::new(config.topology.clone()));
        Self { controller: Controller::new(config), view, next_qpn: 16, at_ns: 1 << 30 }
    }

    fn say(&mut self, connection: u64, message: ToController) {
        self.controller.handle_message(Instant::ZERO, ConnectionId(connection), message);
        while let Some(output) = self.controller.poll_output() {
            if let Output::Send { connection, message, .. } = output {
                self.answer(connection.0, message);
            }
        }
    }

    fn qpn(&mut self) -> (Qpn, Psn) {
        self.next_qpn += 1;
        (Qpn::new(self.next_qpn), Psn::new(1))
    }

    fn answer(&mut self, connection: u64, message: FromController) {
        let (qpn, psn) = self.qpn();
        match message {
            FromController::GroupReady { .. } => {
                self.say(
                    connection,
                    ToController::Connect {
                        qpn,
                        psn,
                        path_mtu: Mtu::B1024,
                        more: Vec::new(),
                        receive_share: None,
                    },
                );
            }
            FromController::CreateCommunicator { communicator, has_parent, children, .. } => {
                let edge = |rank: Option<u32>| {
                    let (qpn, psn) = self.qpn();
                    SwitchEdge { rank: rank.unwrap(), qpn, psn, receive_share: None }
                };
                let edges = children.iter().map(|child| child.ranks.first()).map(edge).collect();
                let uplink = has_parent.then_some(SwitchUplink { qpn, psn, receive_share: None });
                self.say(
                    connection,
                    ToController::CommunicatorCreated { communicator, edges, uplink },
                );
            }
            FromController::ConnectParent { communicator, .. } => {
                self.say(connection, ToController::ParentConnected { communicator });
            }
            _ => {}
        }
    }

    fn switch(&mut self, connection: u64, name: &str, address: [u8; 4]) {
        self.controller.handle_connected(Instant::ZERO, ConnectionId(connection));
        let (name, address, limits) = (name.to_owned(), address.into(), SwitchLimits::NONE);
        let presence = Presence::default();
        self.say(connection, ToController::Register { name, address, limits, presence });
    }

    fn join(&mut self, connection: u64, group: &str, world: u32, rank: u32) {
        self.controller.handle_connected(Instant::ZERO, ConnectionId(connection));
        let (group, address) = (group.to_owned(), [10, 0, 1, rank as u8].into());
        let more_addresses = Vec::new();
        let options = CommunicatorOptions::default();
        let (timeout_ms, same_machine, fallback) = (1000, None, FallbackOffer::Off);
        let hello = Hello {
            group,
            world,
            rank,
            address,
            timeout_ms,
            more_addresses,
            same_machine,
            options,
            fallback,
            meeting: None,
            avoid: Vec::new(),
        };
        self.say(connection, ToController::Join(hello));
    }

    /// Has a switch say what its nodes have counted, half a second after the last time.
    fn count(&mut self, connection: u64, switch: &str, bytes: u64) {
        self.at_ns += 500_000_000;
        let overview = self.controller.overview();
        let nodes = overview.groups.iter().filter_map(|it| it.communicator.as_ref());
        for node in nodes.flat_map(|it| &it.nodes).filter(|node| node.switch == switch) {
            let port = |rank| PortCounters {
                rank,
                payload_bytes_sent: bytes,
                payload_bytes_received: 2 * bytes,
                ..PortCounters::default()
            };
            // And of one that it does not have.
            let ports = [None, Some(0), Some(1), Some(2), Some(77)].map(port).to_vec();
            let (communicator, at_ns) = (node.communicator.unwrap(), self.at_ns);
            let message = ToController::Counters { communicator, at_ns, collectives: 9, ports };
            self.say(connection, message);
        }
        self.view.publish(self.controller.overview());
    }

    fn get(&self, path: &str) -> Option<Page> {
        self.view.page(path)
    }

    fn json(&self, path: &str) -> Value {
        let page = self.get(path).unwrap_or_else(|| panic!("{path}"));
        assert_eq!(page.content_type, "application/json");
        serde_json::from_str(&page.text).unwrap()
    }
}

/// Two switches with a tree of three ranks that is ready and counts, and a group that waits.
fn busy() -> Lab {
    let fan_in = FanIn::new(2).unwrap();
    let mut lab = Lab::new(ControllerConfig { fan_in, ..ControllerConfig::new(1) });
    lab.switch(1, "s0", [10, 0, 0, 1]);
    lab.switch(2, "s1", [10, 0, 0, 2]);
    for rank in 0..3 {
        lab.join(10 + u64::from(rank), HOSTILE, 3, rank);
    }
    lab.join(20, "waits", 2, 1);
    for bytes in [1000, 3000] {
        lab.count(1, "s0", bytes);
        lab.count(2, "s1", bytes);
    }
    lab
}

fn encoded(name: &str) -> String {
    name.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// A value against a schema: the part of JSON Schema that `openapi.json` uses.
fn check(document: &Value, schema: &Value, value: &Value, at: &str) {
    if let Some(reference) = schema["$ref"].as_str() {
        let schema = document.pointer(reference.trim_start_matches('#'));
        return check(document, schema.unwrap_or_else(|| panic!("{reference}")), value, at);
    }
    if let Some([other, null]) = schema["oneOf"].as_array().map(Vec::as_slice) {
        assert_eq!(null, &json!({ "type": "null" }));
        if !value.is_null() {
            check(document, other, value, at);
        }
        return;
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_u64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.clone(),
        one => vec![one.clone()],
    };
    let fits = kinds.iter().any(|it| it == kind || (kind == "integer" && it == "number"));
    assert!(fits, "{at}: {value} is not {kinds:?}");
    if let Some(values) = schema["enum"].as_array() {
        assert!(values.contains(value), "{at}: {value} is none of {values:?}");
    }
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        check(document, &schema["items"], item, &format!("{at}/{index}"));
    }
    let Some(members) = value.as_object() else { return };
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(members.contains_key(name.as_str().unwrap()), "{at} lacks {name}");
    }
    for (name, member) in members {
        let schema = &schema["properties"][name];
        assert!(schema.is_object(), "{at} has {name}, which is not documented");
        check(document, schema, member, &format!("{at}/{name}"));
    }
}

fn check_all(lab: &Lab, name: &str) {
    let document = lab.json("/openapi.json");
    for (path, entry) in document["paths"].as_object().unwrap() {
        let methods: Vec<&String> = entry.as_object().unwrap().keys().collect();
        assert_eq!(methods, ["get"]);
        let real = path.replace("{name}", &encoded(name));
        let page = lab.get(&real).unwrap_or_else(|| panic!("{real}"));
        let content = entry["get"]["responses"]["200"]["content"].as_object().unwrap();
        let (content_type, body) = content.iter().next().unwrap();
        assert_eq!(page.content_type, content_type, "{path}");
        if content_type == "application/json" && body["schema"]["$ref"].is_string() {
            let value = serde_json::from_str(&page.text).unwrap();
            check(&document, &body["schema"], &value, path);
        }
    }
}

#[test]
fn what_is_served_is_what_is_documented() {
    let lab = busy();
    check_all(&lab, HOSTILE);
    check_all(&lab, "waits");
    let examples = include_str!("../../../../docs/topology-files.md");
    let example = examples.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    let file = TopologyFile::parse(std::path::Path::new("t"), example).unwrap();
    let topology = Some(Arc::new(file.topology));
    let lab = Lab::new(ControllerConfig { topology, ..ControllerConfig::new(1) });
    let document = lab.json("/openapi.json");
    let schema = json!({ "$ref": "#/components/schemas/Topology" });
    let value = lab.json("/api/v1/topology");
    assert_eq!(value["source"], "file");
    check(&document, &schema, &value, "topology");
}

#[test]
fn a_group_is_shown_with_its_tree_and_what_moves_on_each_edge() {
    let lab = busy();
    let group = lab.json(&format!("/api/v1/groups/{}", encoded(HOSTILE)));
    assert_eq!(group["state"], "communicator_ready");
    assert_eq!(
        group["members"][2],
        json!({
            "rank": 2, "address": "10.0.1.2", "more_addresses": [], "topology_id": null,
            "connected": true, "left": false,
        })
    );
    let nodes = group["communicator"]["nodes"].as_array().unwrap();
    assert_eq!(group["communicator"]["path_mtu"], 1024);
    assert_eq!((&group["communicator"]["trees"], &nodes[0]["tree"]), (&json!(1), &json!(0)));
    assert_eq!(group["communicator"]["communicator"], nodes[0]["communicator"]);
    let mut ranks = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        assert_eq!((&node["state"], &node["collectives"]), (&json!("ready"), &json!(9)));
        for edge in node["edges"].as_array().unwrap() {
            // Two switches count by turns, each once in a second.
            assert_eq!(edge["rates"]["payload_bytes_sent"], 2000.0, "{edge}");
            assert_eq!(edge["counters"]["payload_bytes_received"], 6000, "{edge}");
            ranks.extend(edge["rank"].as_u64());
            let Some(peer) = edge["node"].as_u64() else { continue };
            // The other end says the same.
            let other = nodes[peer as usize]["edges"].as_array().unwrap().iter();
            let mut other = other.filter(|it| it["node"] == index && it["up"] != edge["up"]);
            assert!(other.any(|it| it["my"] == edge["peer"] && it["peer"] == edge["my"]), "{edge}");
        }
    }
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2]);
    let groups = lab.json("/api/v1/groups");
    assert_eq!(groups["groups"][0]["payload_bytes_per_second"], 12_000.0);
    assert_eq!(groups["groups"][1]["waits_for"], "rank 0");
}

#[test]
fn without_a_file_the_network_is_what_trees_use() {
    let topology = busy().json("/api/v1/topology");
    assert_eq!(topology["source"], "trees");
    let lengths = ["switches", "hosts", "links"].map(|it| topology[it].as_array().unwrap().len());
    // Three ranks, of which one waits in another group, and the link between the switches.
    assert_eq!(lengths, [2, 3, 4], "{topology}");
}

#[test]
fn metrics_have_every_edge_and_hostile_names_stay_labels() {
    let lab = busy();
    let text = lab.get("/metrics").unwrap().text;
    assert!(text.contains("millstream_controller_switches 2\n"), "{text}");
    assert!(text.contains("millstream_controller_groups{state=\"communicator_ready\"} 1\n"));
    let name = HOSTILE.replace('"', "\\\"");
    let sent = "millstream_tree_edge_payload_sent_bytes_total{";
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with(sent)).collect();
    // Three ranks, and both ends of two edges between nodes.
    assert_eq!(lines.len(), 7, "{text}");
    for line in lines {
        assert!(line.contains(&format!("group=\"{name}\"")) && line.ends_with(" 3000"), "{line}");
    }
}

#[test]
fn nothing_else_is_there() {
    let lab = busy();
    for path in ["/api", "/api/v1", "/api/v1/groups/", "/api/v1/groups/none", "/page", "/page.css/"]
    {
        assert_eq!(lab.get(path), None, "{path}");
    }
    // Nothing is said of what there is before the controller has said something.
    let empty = Lab::new(ControllerConfig::new(1));
    assert_eq!(empty.json("/api/v1/groups"), json!({ "groups": [] }));
}
