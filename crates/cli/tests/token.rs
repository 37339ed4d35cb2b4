//! Nodes with a token, and commands that have the same, another one, or none: real processes.

mod common;

use std::fs;

use common::{Folder, Output, Running, address, bytes, millstream};

/// Puts a file into a segment, with these variables.
fn put(segment: &str, protocol: &str, file: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = millstream();
    command.args(["put", "--segment", segment, "--protocol", protocol, "--bind", &address(), file]);
    Running::start("put", command.envs(variables.iter().copied())).output()
}

#[test]
fn a_node_with_a_token_serves_those_who_have_it_and_tells_others_why_not() {
    let folder = Folder::new();
    let (secret, file) = (folder.file("token"), folder.file("a"));
    fs::write(&secret, "the token of this cluster\n").unwrap();
    fs::write(&file, bytes(100_000, 1)).unwrap();
    for protocol in ["rdma:soft", "tcp"] {
        let mut command = millstream();
        command.args(["node", "--protocol", protocol, "--bind", &address(), "--buffer", "1MiB"]);
        command.env("MILLSTREAM_TOKEN_FILE", &secret);
        let mut node = Running::start("node", &mut command);
        let segment = node.ready()["segment"].as_str().unwrap().to_owned();
        let ask = |variables: &[(&str, &str)]| put(&segment, protocol, &file, variables);
        let refused = |variables: &[(&str, &str)], reason: &str| {
            let output = ask(variables);
            let error = output.failure(1);
            assert!(error.contains(&segment) && error.contains(reason), "{error}");
        };
        refused(
            &[("MILLSTREAM_TOKEN", "the token of another one")],
            "its token is another than ours",
        );
        refused(&[], "only who have its token, and none is set here");
        ask(&[("MILLSTREAM_TOKEN", "the token of this cluster")]).success();
        ask(&[("MILLSTREAM_TOKEN_FILE", &secret)]).success();
        let output = ask(&[("MILLSTREAM_TOKEN", "short")]);
        assert!(output.failure(1).contains("the token has 5 bytes"), "{}", output.stderr);
        node.signal("TERM");
        node.output().success();
    }
}
