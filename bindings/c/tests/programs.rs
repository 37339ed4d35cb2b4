//! C programs, compiled with gcc as users would and run with the library.

mod common;

use std::fs;
use std::net::Ipv4Addr;

use common::{compile, compile_with, folder, run};
use millstream_lab::RdmaLibrary;
use millstream_net::address::local_addresses;
use millstream_transfer::{Config, FileOptions, NvmeofConfig, TransferEngine};

#[test]
fn structures_and_numbers_are_those_of_the_original() {
    compile("layout").run(&[]);
}

#[test]
fn what_is_null_wrong_freed_or_destroyed_is_a_code() {
    compile("bad_input").run(&[]);
}

#[test]
fn a_range_is_good_wholly_in_one_buffer_and_else_touches_nothing() {
    let program = compile("addresses");
    for protocol in ["tcp", "shm", "rdma"] {
        program.run(&[protocol]);
    }
}

#[test]
fn programs_written_for_the_original_find_what_they_rely_on() {
    compile("leniency").run(&[]);
}

/// Where no settings name devices, all: those of them that work. On loopback only what is named.
#[test]
fn an_engine_that_discovers_its_transports_takes_the_devices_of_the_system() {
    let library = RdmaLibrary::compile(&folder("devices-library"), &["mlx5_0", "mlx5_1"]).unwrap();
    let program = compile("devices");
    let (first, second) = ("mlx5_0", "mlx5_1");
    let reached = local_addresses().unwrap().into_iter().map(|(_, address)| address);
    let reached = reached.filter(|it| it.is_ipv4() && !it.is_loopback()).map(|it| it.to_string());
    let elsewhere = reached.take(1).map(|host| (host, "", "discover", vec![first, second]));
    let here = [
        ("", "discover", vec![]),
        ("", "install", vec![]),
        ("all", "discover", vec![first, second]),
        ("all", "install", vec![first, second]),
        ("missing,mlx5_1", "discover", vec![second]),
    ];
    let here = here.map(|(named, how, tried)| ("127.0.0.1".to_owned(), named, how, tried));
    for (host, named, how, tried) in elsewhere.chain(here) {
        let mut command = program.command();
        command.args([&host, how]).env("MC_TE_FILTERS", named).env_remove("MC_FORCE_TCP");
        library.put_before(&mut command);
        let stderr = String::from_utf8(run(&mut command).stderr).unwrap();
        assert_eq!(RdmaLibrary::tried(&stderr), tried, "{host} {named:?} {how}: {stderr}");
    }
}

#[test]
fn requests_have_priorities_deadlines_transports_and_classes() {
    let file = folder("options").join("policy.toml");
    let text = "[class.some]\npriority = \"bulk\"\ntransports = [\"tcp\", \"rdma\"]\n\n\
                [class.small]\nbytes_in_flight = 4095\n";
    fs::write(&file, text).unwrap();
    compile("options").run(&[file.to_str().unwrap()]);
}

#[test]
fn writes_to_files_are_durable_where_that_is_asked_for_and_memory_is_refused() {
    let file = folder("durable").join("file");
    fs::write(&file, [0; 4096]).unwrap();
    let target = TransferEngine::new(Config::new(Ipv4Addr::LOCALHOST.into())).unwrap();
    target.install_nvmeof(NvmeofConfig::default()).unwrap();
    let options = FileOptions { writable: true, ..FileOptions::default() };
    let name = target.register_file(&file, options).unwrap();
    compile("durable").run(&[&name]);
    assert_eq!(fs::read(file).unwrap(), [7; 4096]);
}

/// It is another file where it is mapped, so that bytes say which one was read.
#[test]
fn files_are_offered_mapped_and_taken_back() {
    let folder = fs::canonicalize(folder("files")).unwrap();
    let (offered, mapped) = (folder.join("offered"), folder.join("mapped"));
    fs::write(&offered, [1; 65536]).unwrap();
    fs::write(&mapped, [2; 65536]).unwrap();
    compile("files").run(&[folder.to_str().unwrap()]);
    let mut expected = [1; 65536];
    expected[100..5100].fill(7);
    assert!(fs::read(&offered).unwrap() == expected);
    assert!(fs::read(&mapped).unwrap() == [2; 65536]);
}

#[test]
fn many_threads_use_an_engine_and_it_is_destroyed_amid_their_calls() {
    let program = compile("threads");
    for protocol in ["tcp", "shm", "rdma"] {
        program.run(&[protocol]);
    }
}

#[test]
fn a_forked_process_leaves_the_engines_of_the_other_alone() {
    compile("forked").run(&[]);
}

#[test]
fn forks_of_a_process_whose_threads_transfer_have_engines_of_their_own() {
    compile("forking").run(&[]);
}

#[test]
fn a_sanitizer_finds_nothing() {
    for name in ["bad_input", "leniency"] {
        let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover"];
        let source = format!("tests/programs/{name}.c");
        compile_with(&format!("{name}-sanitized"), &source, &flags).run(&[]);
    }
}
