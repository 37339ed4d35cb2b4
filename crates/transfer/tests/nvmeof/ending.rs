//! Requests that are canceled, and segments that are closed, amid transfers.

use std::fs;
use std::os::unix::fs::FileExt;

use millstream_transfer::{FileOptions, NvmeofConfig, Opcode, TransferRequest, TransferState};

use crate::common::{LONG, contents, pattern, private};
use crate::fixture::{Folder, engine, pair, request, writable};

#[test]
fn cancel_ends_and_memory_can_go_meanwhile() {
    const LENGTH: u64 = 64 << 20;
    let folder = Folder::new();
    let path = folder.file("cancel", &[]);
    let (target, initiator) = pair();
    let options = FileOptions { length: Some(LENGTH), ..writable() };
    let segment = initiator.open_segment(&target.register_file(&path, options).unwrap()).unwrap();
    let (local, going) =
        (private(&initiator, LENGTH as usize), private(&initiator, LENGTH as usize));
    let whole = |opcode, local: u64| TransferRequest {
        opcode,
        source: local,
        target: segment.id(),
        target_offset: 0,
        length: LENGTH,
    };
    for opcode in [Opcode::Write, Opcode::Read] {
        let batch = initiator.allocate_batch(20).unwrap();
        initiator.submit(&batch, &[whole(opcode, local.address()); 20]).unwrap();
        for task in 0..20 {
            initiator.cancel(&batch, task).unwrap();
        }
        assert!(initiator.wait(&batch, LONG));
        let statuses = initiator.statuses(&batch);
        assert_eq!(statuses[19].state, TransferState::Canceled);
        assert!(statuses.iter().all(|status| status.error.is_none()), "{statuses:?}");
        initiator.free(batch).unwrap();
    }
    // Nothing comes after the end: what is there now stays.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&pattern(LENGTH as usize, 8), 0).unwrap();
    let batch = initiator.allocate_batch(8).unwrap();
    let of_both: Vec<_> = [Opcode::Write, Opcode::Read]
        .into_iter()
        .cycle()
        .take(8)
        .map(|opcode| whole(opcode, going.address()))
        .collect();
    initiator.submit(&batch, &of_both).unwrap();
    drop(going);
    assert!(initiator.wait(&batch, LONG));
    for status in initiator.statuses(&batch) {
        let unregistered =
            status.error.is_some_and(|error| error.to_string().contains("unregistered"));
        assert!(unregistered || status.state == TransferState::Completed);
    }
    initiator.free(batch).unwrap();
    // The link is as good as it was.
    initiator.submit_and_wait(&[whole(Opcode::Read, local.address())], LONG).unwrap();
    assert!(contents(&local, 0, LENGTH as usize) == fs::read(&path).unwrap());
}

/// As the engine promises: of a file that is mapped here and of one that is not.
#[test]
fn transfers_go_on_when_their_segment_is_closed_or_refreshed() {
    const LENGTH: u64 = 32 << 20;
    let folder = Folder::new();
    let path = folder.file("closed", &[]);
    for mapped in [false, true] {
        let target = engine(NvmeofConfig::default());
        let initiator = engine(NvmeofConfig {
            mapped_folders: if mapped { vec![folder.0.clone()] } else { Vec::new() },
            server_name: Some("here".to_owned()),
            ..NvmeofConfig::default()
        });
        let options = FileOptions {
            length: Some(LENGTH),
            local_path_map: [("here".to_owned(), path.to_str().unwrap().to_owned())].into(),
            ..writable()
        };
        let name = target.register_file(&path, options).unwrap();
        let segment = initiator.open_segment(&name).unwrap();
        let local = private(&initiator, LENGTH as usize);
        let batch = initiator.allocate_batch(4).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH);
        initiator.submit(&batch, &[write; 2]).unwrap();
        initiator.refresh_segment(segment.id()).unwrap();
        initiator.submit(&batch, &[write; 2]).unwrap();
        initiator.close_segment(segment.id()).unwrap();
        assert!(initiator.wait(&batch, LONG));
        for status in initiator.statuses(&batch) {
            assert_eq!(status.state, TransferState::Completed, "{mapped} {status:?}");
        }
        initiator.free(batch).unwrap();
    }
}
