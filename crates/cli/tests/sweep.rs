//! `bench sweep` and `bench collective`: every collective, type and operation, checked.

mod common;

use common::run;

const COLLECTIVES: [&str; 6] =
    ["allreduce", "reduce", "broadcast", "barrier", "reducescatter", "allgather"];

#[test]
fn all_collectives_types_and_operations_are_exact() {
    let worlds = ["--world=1,3", "--count=0,1,2,1023,1024,1025", "--json"];
    let table = run(&[&["bench", "sweep"], &worlds[..]].concat()).success().json();
    assert_eq!(table["wrong"], 0, "{table}");
    let rows = table["rows"].as_array().unwrap();
    // Each for two worlds and two modes.
    assert_eq!(rows.len(), COLLECTIVES.len() * 4);
    for (row, collective) in rows.iter().zip(COLLECTIVES.into_iter().cycle()) {
        assert_eq!(row["collective"], collective);
        let world = row["world"].as_u64().unwrap();
        // 8 operations of 8 types of integers, and 5 of 4 types of floats.
        let kinds = match collective {
            "allreduce" | "reduce" | "reducescatter" => 8 * 8 + 5 * 4,
            "barrier" => 1,
            _ => 12,
        };
        assert_eq!(row["calls"], kinds * 6 * 6 * world, "{row}");
    }
}

#[test]
fn long_vectors_and_many_ranks_are_exact() {
    for arguments in [
        ["--world=2", "--count=1048579", "--dtype=fp16", "--op=avg"],
        ["--world=17", "--count=0,1025,40000", "--dtype=int64", "--op=sum"],
        ["--world=3", "--count=1,1023,20000,50001", "--dtype=int32", "--trees=1,2,3"],
    ] {
        for path in ["--path=switch", "--path=shared-memory"] {
            let output = run(&[&["bench", "sweep", path], &arguments[..]].concat()).success();
            assert!(output.stdout.ends_with(" elements checked, 0 wrong\n"), "{}", output.stdout);
        }
    }
}

#[test]
fn trees_of_several_levels_are_exact() {
    // Only the root divides a sum.
    let operations = "--op=avg,max";
    let sweep = ["bench", "sweep", "--world=2,3,5", "--fan-in=64,2", operations, "--json"];
    for more in [
        ["--count=0,1,1025,20001", "--dtype=uint8,fp16", "--switches=3"],
        // All nodes of a tree are on one switch.
        ["--count=1024,20001", "--dtype=int64", "--switches=1"],
        ["--count=1,50001", "--dtype=int32", "--trees=2"],
    ] {
        let table = run(&[&sweep[..], &more].concat()).success().json();
        assert_eq!(table["wrong"], 0, "{table}");
        let rows = table["rows"].as_array().unwrap();
        let number = |row: &serde_json::Value, column| row[column].as_u64().unwrap();
        let shape = |row| ["fan_in", "world", "levels"].map(|column| number(row, column));
        let mut shapes: Vec<_> = rows.iter().map(shape).collect();
        shapes.dedup();
        // Two ranks have one level with either fan-in.
        assert_eq!(shapes, [[64, 2, 1], [64, 3, 1], [64, 5, 1], [2, 3, 2], [2, 5, 3]]);
        assert_eq!(rows.len(), shapes.len() * COLLECTIVES.len() * 2);
    }
    let refused = run(&["bench", "sweep", "--world=3", "--fan-in=1"]);
    let sentence = refused.failure(2);
    assert!(sentence.contains("--fan-in 1: a tree of it has up to 1 ranks"), "{sentence}");
}

#[test]
fn all_are_exact_through_shared_memory() {
    let worlds = ["--world=1,3", "--count=0,1,2,1023,1024,1025", "--mode=write", "--json"];
    let sweep = ["bench", "sweep", "--path=shared-memory"];
    let table = run(&[&sweep[..], &worlds[..]].concat()).success().json();
    assert_eq!(table["wrong"], 0, "{table}");
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), COLLECTIVES.len() * 2);
    assert!(rows.iter().all(|row| row["levels"] == 0), "{table}");
}

#[test]
fn all_are_exact_among_hosts_with_several_ranks() {
    let sweep = ["bench", "sweep", "--path=auto", "--json"];
    for arguments in [
        ["--world=4", "--hosts=2", "--count=0,1025", "--mode=write,send"],
        ["--world=5", "--hosts=3", "--count=1,20001", "--dtype=int32"],
    ] {
        let table = run(&[&sweep[..], &arguments].concat()).success().json();
        assert_eq!(table["wrong"], 0, "{table}");
        assert_eq!(table["rows"].as_array().unwrap().len(), COLLECTIVES.len() * 2);
    }
    let long = ["--world=4", "--hosts=2", "--count=300001", "--dtype=fp16", "--op=avg"];
    let more = ["--trees=1,2"];
    let table = run(&[&sweep[..], &long, &more].concat()).success().json();
    assert_eq!(table["wrong"], 0, "{table}");
}

#[test]
fn bench_collective_has_a_row_for_each_collective_and_size() {
    let common =
        ["bench", "collective", "--hosts=3", "--size=4096,40", "--iters=2", "--dtype=bf16"];
    for more in [["--mode=send", "--root=2"], ["--in-place", "--op=max"]] {
        let json = run(&[&common[..], &more[..], &["--json"]].concat()).success().json();
        let rows = json["rows"].as_array().unwrap();
        let names: Vec<&str> = rows.iter().map(|row| row["collective"].as_str().unwrap()).collect();
        assert_eq!(names.len(), 11, "a barrier has no size: {names:?}");
        for row in rows {
            assert_eq!(row["wrong"], 0, "{row}");
            match (row["collective"].as_str().unwrap(), row["bytes"].as_u64().unwrap()) {
                ("barrier", bytes) => assert_eq!(bytes, 0),
                // Three equal parts.
                ("reducescatter" | "allgather", bytes) => assert!([4092, 36].contains(&bytes)),
                (_, bytes) => assert!([4096, 40].contains(&bytes)),
            }
            assert_eq!(
                row["checked"].as_u64().unwrap() > 0,
                row["collective"] != "barrier",
                "{row}"
            );
        }
    }
    let table = run(&common).success().stdout;
    let columns = table.lines().nth(1).unwrap();
    for column in ["collective", "size", "count", "redop", "root", "busbw", "wrong"] {
        assert!(columns.contains(column), "{columns}");
    }
    assert_eq!(table.lines().count(), 2 + 11, "{table}");
}
