use super::*;

fn example() -> SegmentDesc {
    SegmentDesc {
        name: "127.0.0.1:15001".to_owned(),
        protocol: "rdma".to_owned(),
        devices: vec![DeviceDesc {
            name: "soft-127.0.0.1".to_owned(),
            lid: 0,
            gid: Gid::from_address("127.0.0.1".parse().unwrap()),
        }],
        buffers: vec![BufferDesc {
            name: "cpu:0".to_owned(),
            addr: 94_274_042_963_760,
            length: 65_536,
            rkey: vec![257],
            lkey: vec![257],
            ..BufferDesc::default()
        }],
        buffers_left_out: 0,
        priority_matrix: [("cpu:0".to_owned(), (vec!["soft-127.0.0.1".to_owned()], Vec::new()))]
            .into(),
        shm: None,
        file_target: None,
        tcp_data_host: None,
        tcp_data_port: None,
        tcp_proto_version: None,
        tcp_message_version: None,
        tcp_token_port: None,
        tcp_tls_port: None,
        control_addresses: Vec::new(),
        incarnation: None,
        timestamp: "2026-11-21 01:49:20.352931".to_owned(),
    }
}

const EXAMPLE: &str = r#"{"name":"127.0.0.1:15001","protocol":"rdma","devices":[{"name":"soft-127.0.0.1","lid":0,"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01"}],"buffers":[{"name":"cpu:0","addr":94274042963760,"length":65536,"rkey":[257],"lkey":[257]}],"priority_matrix":{"cpu:0":[["soft-127.0.0.1"],[]]},"timestamp":"2026-11-21 01:49:20.352931"}"#;

#[test]
fn json_both_ways() {
    assert_eq!(String::from_utf8(example().to_json()).unwrap(), EXAMPLE);
    assert_eq!(SegmentDesc::from_json(EXAMPLE.as_bytes()).unwrap(), example());
}

#[test]
fn the_addresses_where_it_answers_are_text_and_not_too_many() {
    let mut descriptor = example();
    descriptor.control_addresses =
        ["192.0.2.2:7001", "[2001:db8::2]:7001"].map(|it| it.parse().unwrap()).into();
    let text = descriptor.to_json();
    assert_eq!(SegmentDesc::from_json(&text).unwrap(), descriptor);
    let text = String::from_utf8(text).unwrap();
    let expected = r#""control_addresses":["192.0.2.2:7001","[2001:db8::2]:7001"]"#;
    assert!(text.contains(expected), "{text}");
    let absent = text.replace(expected, r#""control_addresses":null"#);
    assert_eq!(SegmentDesc::from_json(absent.as_bytes()).unwrap().control_addresses, []);
    descriptor.control_addresses = vec![descriptor.control_addresses[0]; MAX_DEVICES + 1];
    let error = SegmentDesc::from_json(&descriptor.to_json()).unwrap_err().to_string();
    assert!(error.contains("more than 256 addresses where it answers"), "{error}");
}

#[test]
fn shared_memory_has_keys_of_its_own() {
    let mut descriptor = example();
    descriptor.buffers[0].shm_key = Some(u64::MAX);
    descriptor.shm = Some(SharedMemoryDesc {
        boot_id: "b".to_owned(),
        pid_namespace: 1,
        network_namespace: 2,
        socket: "s".to_owned(),
    });
    assert_eq!(SegmentDesc::from_json(&descriptor.to_json()).unwrap(), descriptor);
    for socket in [String::new(), "a\0b".to_owned(), "x".repeat(108)] {
        descriptor.shm.as_mut().unwrap().socket = socket;
        let error = SegmentDesc::from_json(&descriptor.to_json()).unwrap_err().to_string();
        assert!(error.contains("socket for shared memory"), "{error}");
    }
}

/// As an engine of Mooncake 0.3.13 says it, word for word.
const TCP: &str = r#"{"buffers":[{"addr":94274042963760,"length":65536,"name":"nodeA:12345"}],"name":"nodeA:12345","protocol":"tcp","rdma_server_name":"","tcp_data_host":"192.0.2.2","tcp_data_port":15270,"tcp_proto_version":2,"timestamp":"2026-11-21 01:49:20.352931"}"#;

#[test]
fn a_tcp_data_port() {
    let descriptor = SegmentDesc::from_json(TCP.as_bytes()).unwrap();
    assert_eq!(descriptor.tcp_data_host.as_deref(), Some("192.0.2.2"));
    assert_eq!((descriptor.tcp_data_port, descriptor.tcp_proto_version), (Some(15270), Some(2)));
    assert_eq!(descriptor.tcp_message_version, None);
    let ours = SegmentDesc { tcp_message_version: Some(1), ..descriptor };
    let text = String::from_utf8(ours.to_json()).unwrap();
    assert!(text.contains(r#""tcp_message_version":1"#), "{text}");
    assert_eq!(SegmentDesc::from_json(text.as_bytes()).unwrap(), ours);
}

/// As Mooncake's stores have it: no addresses, no names, no keys.
const FILES: &str = r#"{"name":"nvmeof/a:1/f","protocol":"nvmeof","buffers":[{"length":4096,"file_path":"/data/f","local_path_map":{"b:2":"/mnt/f"}},{"length":100,"file_path":"/data/g","local_path_map":null}]}"#;

#[test]
fn files_follow_each_other() {
    let descriptor = SegmentDesc::from_json(FILES.as_bytes()).unwrap();
    let [first, second] = &descriptor.buffers[..] else { panic!("{descriptor:?}") };
    assert_eq!((first.addr, first.length, first.name.as_str()), (0, 4096, "/data/f"));
    assert_eq!((second.addr, second.length), (4096, 100));
    assert_eq!(first.local_path_map["b:2"], "/mnt/f");
    let again = SegmentDesc::from_json(&descriptor.to_json()).unwrap();
    assert_eq!(again, descriptor);
}

#[test]
fn a_file_has_a_key_and_a_target() {
    let mut descriptor = SegmentDesc::from_json(FILES.as_bytes()).unwrap();
    descriptor.buffers[0].file_key = Some(FileKey(7));
    let place = FileTargetDesc { host: "a".to_owned(), port: 9, ..Default::default() };
    descriptor.file_target = Some(place.clone());
    let text = String::from_utf8(descriptor.to_json()).unwrap();
    assert!(text.contains(r#""file_target":{"host":"a","port":9}"#), "{text}");
    assert!(text.contains(r#""file_key":"00000000000000000000000000000007""#), "{text}");
    assert_eq!(SegmentDesc::from_json(text.as_bytes()).unwrap(), descriptor);
    let guarded = FileTargetDesc { token: true, tls: true, ..place };
    let guarded = SegmentDesc { file_target: Some(guarded), ..descriptor };
    assert_eq!(SegmentDesc::from_json(&guarded.to_json()).unwrap(), guarded);
    for key in ["", "7", "+0000000000000000000000000000007"] {
        let text = text.replace("00000000000000000000000000000007", key);
        assert!(SegmentDesc::from_json(text.as_bytes()).is_err(), "{key}");
    }
}

#[test]
fn files_that_are_none() {
    for (from, to, what) in [
        (r#""file_path":"/data/g""#, r#""file_path":"""#, "1: has no name"),
        (r#""file_path":"/data/f""#, r#""name":"x""#, "0: has no path of a file"),
        ("/mnt/f", r"a\u0000b", "0: is mapped to what is no path, or at too many servers"),
        ("4096", "0", "0: is empty"),
        ("4096", "18446744073709551615", "1: exceeds the address space"),
        (r#""nvmeof","#, r#""tcp","#, "0: is a file, which the protocol has not"),
    ] {
        let text = FILES.replace(from, to);
        let text = text.replace(
            r#""protocol":"tcp","buffers":[{"#,
            r#""protocol":"tcp","buffers":[{"name":"n","#,
        );
        let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
        let (buffer, what) = what.split_once(": ").unwrap();
        assert_eq!(descriptor.buffers[buffer.parse::<usize>().unwrap()].fault, Some(what));
    }
}

/// Who goes by offsets in the segment would get another file than the one that its process means.
#[test]
fn after_a_file_without_a_length_no_offset_is_known() {
    let said = |lengths: &[Option<u64>]| {
        let length = |it: &Option<u64>| it.map(|it| format!(r#""length":{it},"#));
        let file =
            |it: &Option<u64>| format!(r#"{{{}"file_path":"/f"}}"#, length(it).unwrap_or_default());
        let files: Vec<_> = lengths.iter().map(file).collect();
        let files = files.join(",");
        let text = format!(r#"{{"name":"a","protocol":"nvmeof","buffers":[{files}]}}"#);
        SegmentDesc::from_json(text.as_bytes()).unwrap()
    };
    let descriptor = said(&[Some(100), None, Some(10), None]);
    let faults: Vec<_> = descriptor.buffers.iter().map(|it| it.fault).collect();
    assert_eq!(faults, [None, Some(NO_LENGTH), Some(NO_PLACE), Some(NO_PLACE)]);
    assert_eq!(descriptor.buffer_with(0, 100), Some(&descriptor.buffers[0]));
    assert_eq!(descriptor.unusable_at(99), None);
    for offset in [100, 105, 1 << 40] {
        assert_eq!(descriptor.buffer_with(offset, 1), None);
        let told = descriptor.unusable_at(offset).unwrap();
        assert!(told.starts_with("buffer 1 (") && told.ends_with(NO_LENGTH), "{told}");
    }
    // One that says that it is empty is bad, too, and moves none of the others.
    let descriptor = said(&[Some(100), Some(0), Some(10)]);
    let faults: Vec<_> = descriptor.buffers.iter().map(|it| it.fault).collect();
    assert_eq!(faults, [None, Some("is empty"), None]);
    assert_eq!(descriptor.buffer_with(105, 1), Some(&descriptor.buffers[2]));
}

#[test]
fn a_descriptor_of_another_protocol_with_unknown_keys() {
    // As the Mooncake wheel 0.3.13.post1 writes it.
    let text = r#"{"buffers":[{"addr":94274042963760,"length":65536,"name":"nodeA:12345"}],"name":"nodeA:12345","protocol":"tcp","rdma_server_name":"","tcp_data_host":"192.0.2.2","tcp_data_port":15270,"tcp_proto_version":2,"timestamp":"2026-11-21 01:49:20.352931"}
"#;
    let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
    assert_eq!(descriptor.protocol, "tcp");
    assert_eq!(descriptor.devices, []);
    assert!(descriptor.buffers[0].rkey.is_empty());
}

#[test]
fn missing_and_null_are_empty() {
    let text = br#"{"name":"a:1","protocol":"rdma","devices":null,"priority_matrix":null}"#;
    let descriptor = SegmentDesc::from_json(text).unwrap();
    assert_eq!((descriptor.devices.len(), descriptor.buffers.len()), (0, 0));
}

#[test]
fn faults_are_named() {
    type Change = fn(&mut SegmentDesc);
    let refused = |change: Change| {
        let mut descriptor = example();
        change(&mut descriptor);
        SegmentDesc::from_json(&descriptor.to_json()).unwrap_err().to_string()
    };
    let cases: [(Change, &str); 5] = [
        (|d| d.name.clear(), "it has no name"),
        (|d| d.protocol.clear(), "it names no protocol"),
        (|d| d.devices[0].name.clear(), "device 0 has no name"),
        (
            |d| d.devices[0].name = "n".repeat(256),
            "the name of device 0 has 256 bytes, more than 255",
        ),
        (
            |d| d.devices = vec![d.devices[0].clone(); MAX_DEVICES + 1],
            "it has more than 256 devices",
        ),
    ];
    for (change, what) in cases {
        let error = refused(change);
        assert!(error.ends_with(what), "{error}");
    }
}

#[test]
fn one_bad_buffer_leaves_the_others_usable() {
    type Change = fn(&mut BufferDesc);
    let cases: [(Change, &str); 7] = [
        (|it| it.name.clear(), "has no name"),
        (|it| it.addr = 0, "has address 0"),
        (|it| it.length = 0, "is empty"),
        (|it| it.length = u64::MAX, "exceeds the address space"),
        (|it| it.rkey.push(1), "has not one remote key for each device"),
        (|it| it.lkey.push(1), "has not as many local as remote keys"),
        (|it| it.file_path = Some("f".to_owned()), "is a file, which the protocol has not"),
    ];
    for (change, what) in cases {
        let mut written = example();
        let good = written.buffers[0].clone();
        let mut bad = BufferDesc { addr: 0x1000, length: 0x100, ..good.clone() };
        change(&mut bad);
        written.buffers = vec![good.clone(), bad.clone(), BufferDesc { addr: 1 << 20, ..good }];
        let read = SegmentDesc::from_json(&written.to_json()).unwrap();
        assert_eq!(read.buffers[1].fault, Some(what));
        assert_eq!(BufferDesc { fault: None, ..read.buffers[1].clone() }, bad);
        assert_eq!([&read.buffers[0], &read.buffers[2]], [0, 2].map(|it| &written.buffers[it]));
        // It is in its place, as nobody may take the next one for it, and is not used.
        assert_eq!(read.buffer_with(bad.addr, 1), None);
        let told = read.unusable(1).unwrap();
        assert!(told.starts_with("buffer 1 (") && told.ends_with(what), "{told}");
        assert_eq!(read.unusable_at(bad.addr), Some(told));
        assert_eq!((read.unusable(0), read.unusable(3)), (None, None));
        // The text says it to the next reader as it was said.
        assert_eq!(read.to_json(), written.to_json());
    }
}

#[test]
fn buffers_beyond_the_limit_are_left_out_and_counted() {
    let mut descriptor = example();
    let one = BufferDesc { name: "c".to_owned(), addr: 1, length: 1, ..BufferDesc::default() };
    descriptor.buffers = vec![one; MAX_BUFFERS];
    let read = |descriptor: &SegmentDesc| SegmentDesc::from_json(&descriptor.to_json()).unwrap();
    assert_eq!(read(&descriptor), descriptor);
    descriptor.buffers.extend_from_within(..3);
    let read = read(&descriptor);
    assert_eq!((read.buffers.len(), read.buffers_left_out), (MAX_BUFFERS, 3));
    assert!(read.buffers.iter().all(|it| it.fault.is_none()));
}

#[test]
fn texts_that_are_no_descriptor() {
    for text in ["", "[]", "{}", "nonsense", r#"{"name":1}"#, r#"{"name":"a","protocol":{}}"#] {
        assert!(SegmentDesc::from_json(text.as_bytes()).is_err(), "{text}");
    }
    let deep = "[".repeat(100_000);
    assert!(SegmentDesc::from_json(deep.as_bytes()).is_err());
    let gid = EXAMPLE.replace("ff:ff", "ff");
    assert!(SegmentDesc::from_json(gid.as_bytes()).unwrap_err().to_string().contains("GID"));
}

#[test]
fn buffers_are_found_by_range() {
    let mut descriptor = example();
    descriptor.buffers[0].addr = 0x1000;
    descriptor.buffers[0].length = 0x100;
    for (address, length, found) in [
        (0x1000, 0x100, true),
        (0x10ff, 1, true),
        (0x1100, 0, true),
        (0x1100, 1, false),
        (0xfff, 1, false),
        (0x1001, 0x100, false),
        (0x1001, u64::MAX, false),
    ] {
        assert_eq!(descriptor.buffer_with(address, length).is_some(), found, "{address:#x}");
    }
}
