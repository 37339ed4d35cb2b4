use std::path::Path;
use std::time::Duration;

use millstream_transfer_core::PriorityLevel;

use super::*;

const EXAMPLE: &str = include_str!("../../../../docs/policy-file.toml");

fn toml(text: &str) -> Result<PolicyFile, String> {
    PolicyFile::parse(Path::new("p.toml"), text).map_err(|error| error.to_string())
}

fn json(text: &str) -> Result<PolicyFile, String> {
    PolicyFile::parse(Path::new("p.json"), text).map_err(|error| error.to_string())
}

#[test]
fn the_example_of_the_documentation_is_one() {
    let file = toml(EXAMPLE).unwrap();
    let limits = |bytes: u64, requests| AdmissionLimits { bytes: Some(bytes), requests };
    assert_eq!(file.limits, limits(4 << 30, Some(100_000)));
    let decode = PolicyClass {
        name: "decode".to_owned(),
        priority: PriorityLevel::Latency,
        deadline: Some(Duration::from_millis(200)),
        transports: vec!["shm", "rdma"],
        limits: limits(256 << 20, None),
    };
    let deadline = Some(Duration::from_millis(20));
    let strict = PolicyClass { name: "decode-strict".to_owned(), deadline, ..decode.clone() };
    let checkpoint = PolicyClass {
        name: "checkpoint".to_owned(),
        priority: PriorityLevel::Bulk,
        deadline: None,
        transports: vec![],
        limits: limits(1 << 30, Some(4096)),
    };
    assert_eq!(file.classes, [decode, strict, checkpoint]);
}

#[test]
fn json_says_the_same() {
    let text = r#"{
        "class": {
            "a": { "priority": "latency", "deadline": "50ms", "transports": ["rdma"] },
            "b\u0041": { "inherits": "a", "bytes_in_flight": 4096 }
        },
        "limits": { "requests_in_flight": 5 }
    }"#;
    let same = "
        class.a = { priority = \"latency\", deadline = \"50ms\", transports = [\"rdma\"] }
        class.bA = { inherits = \"a\", bytes_in_flight = \"4KiB\" }
        limits.requests_in_flight = 5";
    assert_eq!(json(text).unwrap(), toml(same).unwrap());
    assert_eq!(json("{}").unwrap(), PolicyFile::default());
    assert_eq!(toml("").unwrap(), PolicyFile::default());
}

#[test]
fn what_breaks_a_rule_is_told_with_its_line() {
    for (text, expected) in [
        ("\n[clas.a]\n", "p.toml:2: a policy file has no key \"clas\": is class meant?"),
        (
            "[limits]\n\nx = 1",
            "p.toml:3: limits has no key \"x\": there are bytes_in_flight, requests_in",
        ),
        (
            "[class.a]\nprority = \"bulk\"",
            "p.toml:2: class \"a\" has no key \"prority\": is priority meant?",
        ),
        (
            "[class.a]\npriority = \"high\"",
            "p.toml:2: class \"a\": priority is one of latency, normal, bulk",
        ),
        ("class.a.priority = 1", "p.toml:1: class \"a\": priority is one of"),
        ("class.a.deadline = \"0s\"", "p.toml:1: class \"a\": deadline is a time from 1us to 24h"),
        ("class.a.deadline = \"25h\"", "p.toml:1: class \"a\": deadline is a time"),
        ("class.a.deadline = 50", "p.toml:1: class \"a\": deadline is a time"),
        ("class.a.deadline = \"50\"", "p.toml:1: class \"a\": deadline is a time"),
        (
            "class.a.transports = []",
            "p.toml:1: class \"a\": transports is a list of at least one of local",
        ),
        ("class.a.transports = [\"rdna\"]", "p.toml:1: class \"a\": transports is a list"),
        ("class.a.transports = \"rdma\"", "p.toml:1: class \"a\": transports is a list"),
        (
            "class.a.requests_in_flight = 0",
            "p.toml:1: class \"a\": requests_in_flight is a whole number of at",
        ),
        ("class.a.requests_in_flight = -1", "p.toml:1: class \"a\": requests_in_flight is a whole"),
        (
            "class.a.requests_in_flight = \"1KiB\"",
            "p.toml:1: class \"a\": requests_in_flight is a whole",
        ),
        (
            "limits.bytes_in_flight = \"0\"",
            "p.toml:1: limits: bytes_in_flight is a size of at least 1",
        ),
        ("class.a = 1", "p.toml:1: class \"a\" is a table"),
        ("class = 1", "p.toml:1: class is a table"),
        ("[class.\"\"]", "p.toml:1: a class has a name of 1 to 64 characters"),
        (
            "[class.a]\n[class.b]\ninherits = \"aa\"",
            "p.toml:3: class \"b\" inherits from \"aa\", which is no class: is \"a\" meant?",
        ),
        ("[class.a]\ninherits = 1", "p.toml:2: class \"a\": inherits is the name of a class"),
        ("a = \n", "p.toml:1: "),
        ("[class.a]\n[class.a]", "p.toml:2: duplicate key"),
    ] {
        let error = toml(text).unwrap_err();
        assert!(error.starts_with(expected), "{text:?}: {error}");
    }
}

#[test]
fn cycles_and_limits_that_cannot_be_are_told() {
    for (text, expected) in [
        (
            "[class.a]\ninherits = \"b\"\n[class.b]\ninherits = \"c\"\n[class.c]\ninherits = \"a\"",
            "p.toml:6: class \"c\": inherits goes in a cycle: a -> b -> c -> a",
        ),
        ("[class.a]\ninherits = \"a\"", "p.toml:2: class \"a\": inherits goes in a cycle: a -> a"),
        (
            "[limits]\nbytes_in_flight = 100\n[class.a]\nbytes_in_flight = 101\n",
            "p.toml:4: class \"a\": bytes_in_flight = 101 can never be reached: limits.bytes_in_flight is 100",
        ),
        (
            "[class.a]\nrequests_in_flight = 9\n[class.b]\ninherits = \"a\"\n[limits]\nrequests_in_flight = 8",
            "p.toml:2: class \"a\": requests_in_flight = 9 can never be reached",
        ),
    ] {
        assert!(toml(text).unwrap_err().starts_with(expected), "{:?}", toml(text));
    }
    // A chain as long as there are classes.
    let many = |count: usize| {
        let class = |index| format!("[class.c{index}]\ninherits = \"c{}\"\n", index + 1);
        (0..count - 1).map(class).collect::<String>() + &format!("[class.c{}]\n", count - 1)
    };
    assert_eq!(toml(&many(MAX_CLASSES)).unwrap().classes.len(), MAX_CLASSES);
    let error = toml(&many(MAX_CLASSES + 1)).unwrap_err();
    assert_eq!(error, "p.toml:513: there are more than 256 classes");
}

#[test]
fn faults_of_json_have_their_lines_too() {
    for (text, expected) in [
        (
            "{\n\"class\": {\n\"a\": {\n\"prority\": 1}}}",
            "p.json:4: class \"a\" has no key \"prority\"",
        ),
        ("{\n\"limits\": {},\n\"limits\": {}}", "p.json:3: duplicate key \"limits\""),
        ("[1]", "p.json:1: a policy file in JSON is an object"),
        ("{\n\n\"class\" 1}", "p.json:3: expected `:`"),
        ("{} x", "p.json:1: trailing characters"),
        ("", "p.json:1: EOF while parsing a value"),
        ("{\"class\":{\"a\":{\"deadline\":-5}}}", "p.json:1: class \"a\": deadline is"),
        ("{\"class\":{\"a\":{\"deadline\":1.5}}}", "p.json:1: class \"a\": deadline is"),
        ("{\"class\":{\"a\":{\"priority\":null}}}", "p.json:1: class \"a\": priority is"),
        ("{\"class\":{\"a\":true}}", "p.json:1: class \"a\" is a table"),
    ] {
        let error = json(text).unwrap_err();
        assert!(error.starts_with(expected), "{text:?}: {error}");
    }
    // However many keys: looking for one twice takes time in proportion.
    let many: String = (0..50_000).map(|key| format!("\n\"k{key}\": 0,")).collect();
    let error = json(&format!("{{{many}\n\"k0\": 0}}")).unwrap_err();
    assert_eq!(error, "p.json:50002: duplicate key \"k0\"");
    // However deep: an error, and no overflow.
    assert!(json(&"{\"a\":".repeat(100_000)).is_err() && json(&"[".repeat(100_000)).is_err());
}

#[test]
fn a_file_that_cannot_be_read_is_told() {
    let error = PolicyFile::load(Path::new("/nonexistent/p.toml")).unwrap_err().to_string();
    assert!(
        error.starts_with("cannot read the policy file /nonexistent/p.toml: No such"),
        "{error}"
    );
}

#[test]
fn rules_say_what_they_are_for() {
    let file = toml(
        "[rule.a]\nmemory = \"gpu\"\nsame_machine = false\nlength_below = \"1MiB\"\n\
         transports = [\"tcp\", \"rdma\"]\n[rule.b]\nintent = \"x\"\ntransports = [\"shm\"]",
    );
    let rules = file.unwrap().rules;
    assert_eq!(rules[0].lengths, 0..1 << 20);
    assert_eq!((rules[0].memory, rules[0].same_machine), (Some(MemoryKind::Gpu), Some(false)));
    assert_eq!(rules[0].transports, ["tcp", "rdma"]);
    assert_eq!((rules[1].name.as_str(), rules[1].intent.as_deref()), ("b", Some("x")));
    let same = json(
        r#"{"rule": {"a": {"memory": "gpu", "same_machine": false, "length_below": 1048576,
            "transports": ["tcp", "rdma"]}, "b": {"intent": "x", "transports": ["shm"]}}}"#,
    );
    assert_eq!(same.unwrap().rules, rules);
    let seen = |same_machine| Seen {
        segment: SegmentKind::Memory,
        memory: MemoryKind::Gpu,
        peer_memory: MemoryKind::Host,
        same_machine,
    };
    assert!(rules[0].is_for(seen(false)) && !rules[0].is_for(seen(true)));
}

#[test]
fn what_is_wrong_with_a_rule_is_told() {
    for (text, expected) in [
        (
            "[rule.a]\nlenght_below = 5",
            "p.toml:2: rule \"a\" has no key \"lenght_below\": is length_below meant?",
        ),
        ("[rule.a]\nintent = \"x\"", "p.toml:1: rule \"a\" has no transports"),
        (
            "[rule.a]\ntransports = [\"tpc\"]",
            "p.toml:2: rule \"a\": transports is a list of at least one of local, shm, rdma, nvmeof, tcp, relay",
        ),
        ("[rule.a]\nsame_machine = \"yes\"", "p.toml:2: rule \"a\": same_machine is true or false"),
        ("[rule.a]\nmemory = \"disk\"", "p.toml:2: rule \"a\": memory is host or gpu"),
        (
            "[rule.a]\nlength_from = 5\nlength_below = 5\ntransports = [\"tcp\"]",
            "p.toml:1: rule \"a\": no length is from length_from and below length_below",
        ),
    ] {
        assert_eq!(toml(text).unwrap_err(), expected, "{text}");
    }
    let many: String =
        (0..65).map(|index| format!("[rule.r{index}]\ntransports = [\"tcp\"]\n")).collect();
    assert_eq!(toml(&many).unwrap_err(), "p.toml:129: there are more than 64 rules");
}
