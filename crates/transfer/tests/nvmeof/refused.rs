//! What cannot be done is told, with the file, the range and a remedy.

use std::fs;
use std::path::Path;

use millstream_transfer::{
    Config, FileOptions, NvmeofConfig, Opcode, TransferEngine, TransferRequest, TransferState,
};

use crate::common::{LONG, address, contents, private};
use crate::fixture::{Folder, engine, pair, request, writable};

#[test]
fn what_fails_names_the_file_the_range_and_a_remedy_and_others_go_on() {
    let folder = Folder::new();
    let path = folder.file("fails", &[1; 20_000]);
    let (target, initiator) = pair();
    let name = target.register_file(&path, FileOptions::default()).unwrap();
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, 20_000);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 5000);
    let failed = |requests: &[TransferRequest]| {
        initiator.submit_and_wait(requests, LONG).unwrap_err().to_string()
    };
    let beyond = TransferRequest { target_offset: 19_999, length: 2, ..read };
    assert!(failed(&[beyond]).contains("do not lie in a buffer"), "{}", failed(&[beyond]));

    let shown = path.canonicalize().unwrap();
    let shown = shown.display();
    let text = failed(&[TransferRequest { opcode: Opcode::Write, ..read }]);
    let reading = format!(
        "peer {name} (nic nvmeof): file {shown}, bytes 0 to 5000: it is offered for reading only"
    );
    assert!(text.contains(&reading), "{text}");

    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10_000).unwrap();
    let batch = initiator.allocate_batch(3).unwrap();
    let late = TransferRequest { target_offset: 8000, ..read };
    initiator.submit(&batch, &[read, late, read]).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let states = initiator.statuses(&batch);
    let text = states[1].error.as_ref().unwrap().to_string();
    assert!(text.contains("bytes 8000 to 13000: it has become shorter"), "{text}");
    assert!([0, 2].iter().all(|&index: &usize| states[index].state == TransferState::Completed));
    initiator.free(batch).unwrap();
}

/// On a file system of its own.
#[test]
fn a_full_file_system_is_told() {
    let folder = Folder::new();
    let mount = folder.0.to_str().unwrap();
    let run = |command: &[&str]| {
        let output = std::process::Command::new(command[0]).args(&command[1..]).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !run(&["mount", "-t", "tmpfs", "-o", "size=256k", "millstream", mount]) {
        assert_ne!(std::env::var("MILLSTREAM_REQUIRE").as_deref(), Ok("all"), "cannot mount");
        return eprintln!("skipped: only root can mount");
    }
    let path = folder.file("full", b"x");
    let (target, initiator) = pair();
    let options = FileOptions { length: Some(1 << 20), ..writable() };
    let segment = initiator.open_segment(&target.register_file(&path, options).unwrap()).unwrap();
    let local = private(&initiator, 1 << 20);
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, 1 << 20);
    let text = initiator.submit_and_wait(&[whole], LONG).map_err(|error| error.to_string());
    let some = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    let read = initiator.submit_and_wait(&[some], LONG);
    drop((initiator, target));
    assert!(run(&["umount", mount]));
    let text = text.unwrap_err();
    assert!(text.contains("No space left on device (os error 28): make room"), "{text}");
    assert!(text.contains("undefined"), "{text}");
    read.unwrap();
}

#[test]
fn a_file_that_was_taken_back_is_refused_until_the_segment_is_refreshed() {
    let folder = Folder::new();
    let path = folder.file("again", &[1; 4096]);
    let other = folder.file("other", &[2; 4096]);
    let (target, initiator) = pair();
    let name = target.register_file(&path, writable()).unwrap();
    assert_eq!(target.files(), [name.as_str()]);
    let twice = target.register_file(&path, writable()).unwrap_err();
    assert_eq!(twice.code(), -7, "{twice}");
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, 4096);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[read], LONG).unwrap();

    target.unregister_file(&name).unwrap();
    assert_eq!(target.unregister_file(&name).unwrap_err().code(), -3);
    let text = initiator.submit_and_wait(&[read], LONG).unwrap_err().to_string();
    assert!(text.contains("it is not registered any more"), "{text}");
    let text = initiator.submit_and_wait(&[read], LONG).unwrap_err().to_string();
    assert!(text.contains("has no such segment to offer"), "{text}");

    // Another file, by the same name.
    let options = FileOptions { name: Some("again".to_owned()), ..FileOptions::default() };
    assert_eq!(target.register_file(&other, options).unwrap(), name);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert_eq!(contents(&local, 0, 4096), [2; 4096]);
}

#[test]
fn bad_files_are_refused() {
    let folder = Folder::new();
    let target = engine(NvmeofConfig::default());
    let bad = |path: &Path, name: Option<&str>| {
        let options = FileOptions { name: name.map(str::to_owned), ..FileOptions::default() };
        let error = target.register_file(path, options).unwrap_err();
        assert_eq!(error.code(), -1, "{error}");
        error.to_string()
    };
    assert!(bad(&folder.0.join("none"), None).contains("none: No such file"));
    assert!(bad(&folder.0, None).contains("irectory"));
    assert!(bad(&folder.file("empty", &[]), None).contains("it is empty"));
    let path = folder.file("f", b"x");
    for name in ["", "a/b", "a\nb"] {
        assert!(bad(&path, Some(name)).contains("no name of a file"));
    }
    let plain = TransferEngine::new(Config::new(address())).unwrap();
    let error = plain.register_file(&path, FileOptions::default()).unwrap_err();
    assert!(error.to_string().contains("not installed"));
}
