//! A descriptor takes not much more memory than its text, whatever a remote lists in it. The allocator counts for the
//! whole process, so this one test has a binary to itself.

use std::alloc::System;

use millstream_metadata::{DescriptorError, MAX_BUFFERS, SegmentDesc};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Of each text. A descriptor may be eight times as long.
const LENGTH: usize = 8 << 20;

/// What that many buffers may take, as a list that grows has room for twice as many.
const BUFFERS: usize = 2 * MAX_BUFFERS * 384;

/// And where twice as many are, of several protocols, in a table that grows.
const PLACES: usize = 2 * MAX_BUFFERS * 128;

/// A text of so many bytes, with as many of these elements as fit.
fn text(before: &str, element: &str, after: &str) -> (Vec<u8>, usize) {
    let count = (LENGTH - before.len() - after.len()) / (element.len() + 1);
    let elements = vec![element; count].join(",");
    ([before, &elements, after].concat().into_bytes(), count)
}

/// What is read, and the bytes that were allocated for it, be it for a moment only.
fn read(text: &[u8]) -> (Result<SegmentDesc, DescriptorError>, usize) {
    let region = Region::new(ALLOCATOR);
    let read = SegmentDesc::from_json(text);
    (read, region.change().bytes_allocated)
}

#[test]
fn no_list_of_a_descriptor_takes_many_times_the_memory_of_its_text() {
    let (one, several) =
        (r#"{"name":"a","protocol":"rdma""#, r#"{"name":"a","protocol":["a","b"]"#);
    let buffers = r#","buffers":["#;
    for protocols in [one, several] {
        let (text, count) = text(&[protocols, buffers].concat(), r#"{"addr":1}"#, "]}");
        let (read, allocated) = read(&text);
        let read = read.unwrap();
        let left_out = if protocols == one { count - MAX_BUFFERS } else { 0 };
        assert_eq!(read.buffers_left_out, left_out);
        assert!(allocated < BUFFERS, "{allocated} bytes for {count} buffers");
    }
    // All of them different memory.
    let entries: Vec<_> = (1..=600_000).map(|it| format!(r#"{{"addr":{it}}}"#)).collect();
    let text_of_all = format!("{several}{buffers}{}]}}", entries.join(","));
    let (all, allocated) = read(text_of_all.as_bytes());
    assert_eq!(all.unwrap().buffers_left_out, entries.len() - MAX_BUFFERS);
    assert!(allocated < BUFFERS + PLACES, "{allocated} bytes");
    let in_buffer = |start: &str| [one, buffers, start].concat();
    let of = |list: &str| format!(r#"{one},"{list}":["#);
    let device = format!(r#"{{"gid":"{}"}}"#, ["00"; 16].join(":"));
    for (before, element, after) in [
        (of("devices"), &device[..], "]}"),
        (of("control_addresses"), r#""1.2.3.4:5""#, "]}"),
        (in_buffer(r#"{"rkey":["#), "1", "]}]}"),
        (in_buffer(r#"{"lkey":["#), "1", "]}]}"),
        (of("priority_matrix").replace(":[", r#":{"a":[["#), r#""""#, "],[]]}}"),
        (of("priority_matrix").replace(":[", r#":{"a":[[],["#), r#""""#, "]]}}"),
    ] {
        let (text, count) = text(&before, element, after);
        let (read, allocated) = read(&text);
        assert!(allocated < 256 << 10, "{allocated} bytes for {count} of {element} in {before}");
        let refused = before.contains("devices") || before.contains("control_addresses");
        assert_eq!(read.is_err(), refused, "{before}: {read:?}");
    }
    // Keys of a map are each another one.
    for (before, value, after) in [
        (in_buffer(r#"{"local_path_map":{"#), r#""""#, "}}]}"),
        (of("priority_matrix").replace(":[", ":{"), "[[],[]]", "}}"),
    ] {
        let entries: Vec<_> = (0..200_000).map(|it| format!(r#""{it}":{value}"#)).collect();
        let text = [&before, &entries.join(",")[..], after].concat();
        let (read, allocated) = read(text.as_bytes());
        read.unwrap();
        assert!(allocated < 2 << 20, "{allocated} bytes for {before}");
    }
}
