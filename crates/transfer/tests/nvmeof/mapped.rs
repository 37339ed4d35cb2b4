//! Files that are mapped at the initiator.

use std::fs;
use std::path::Path;

use millstream_metadata::SegmentDesc;
use millstream_transfer::{FileOptions, NvmeofConfig, Opcode};

use crate::common::{LONG, contents, pattern, private};
use crate::fixture::{Folder, done, durable, engine, request, says, ways};

/// As Mooncake does it: the descriptor says where this server has the file, and nobody else does I/O.
#[test]
fn mapped_files_are_opened_here() {
    const LENGTH: usize = 3 << 20;
    let folder = Folder::new();
    let outside = Folder::new();
    let (first, second) =
        (folder.file("a", &vec![1; 1 << 20]), folder.file("b", &vec![2; 2 << 20]));
    let elsewhere = outside.file("c", &[3; 4096]);
    let text = |third: &Path| {
        let file = |path: &Path, length| {
            format!(
                r#"{{"length":{length},"file_path":"/there","local_path_map":{{"here":"{}"}}}}"#,
                path.display()
            )
        };
        let files = [file(&first, 1 << 20), file(&second, 2 << 20), file(third, 4096)];
        format!(r#"{{"name":"nvmeof/a:1/f","protocol":"nvmeof","buffers":[{}]}}"#, files.join(","))
    };
    let (_server, name) = says(SegmentDesc::from_json(text(&elsewhere).as_bytes()).unwrap());
    for way in ways() {
        let folders = vec![folder.0.clone()];
        let server_name = Some("here".to_owned());
        let initiator = engine(NvmeofConfig { mapped_folders: folders, server_name, ..way });
        let segment = initiator.open_segment(&name).unwrap();
        let local = private(&initiator, LENGTH);
        let bytes = pattern(LENGTH, 4);
        local.write(0, &bytes).unwrap();
        // The files of a segment follow each other.
        let requests = |opcode| {
            [(0, 1 << 20), (1 << 20, 100_001), ((1 << 20) + 100_001, (2 << 20) - 100_001)]
                .map(|(at, length)| request(opcode, (&local, at), &segment, at, length))
        };
        done(&initiator, &requests(Opcode::Write), &durable(true));
        assert!(fs::read(&first).unwrap() == bytes[..1 << 20]);
        assert!(fs::read(&second).unwrap() == bytes[1 << 20..]);
        local.write(0, &vec![0; LENGTH]).unwrap();
        initiator.submit_and_wait(&requests(Opcode::Read), LONG).unwrap();
        assert!(contents(&local, 0, LENGTH) == bytes);
        let outside = request(Opcode::Write, (&local, 0), &segment, LENGTH as u64, 1);
        let text = initiator.submit_and_wait(&[outside], LONG).unwrap_err().to_string();
        assert!(text.contains("lies in none of the folders for mapped files"), "{text}");
    }
    assert_eq!(fs::read(&elsewhere).unwrap(), [3; 4096]);
}

/// Though the file system would let us write it.
#[test]
fn what_is_offered_for_reading_is_not_written_where_it_is_mapped() {
    let folder = Folder::new();
    let path = folder.file("read-only", &[1; 8192]);
    let target = engine(NvmeofConfig::default());
    let options = FileOptions {
        local_path_map: [("here".to_owned(), path.to_str().unwrap().to_owned())].into(),
        ..FileOptions::default()
    };
    let name = target.register_file(&path, options).unwrap();
    let initiator = engine(NvmeofConfig {
        mapped_folders: vec![folder.0.clone()],
        server_name: Some("here".to_owned()),
        ..NvmeofConfig::default()
    });
    let segment = initiator.open_segment(&name).unwrap();
    // No process does the I/O.
    drop(target);
    let local = private(&initiator, 8192);
    initiator
        .submit_and_wait(&[request(Opcode::Read, (&local, 0), &segment, 0, 8192)], LONG)
        .unwrap();
    assert_eq!(contents(&local, 0, 8192), [1; 8192]);
    local.write(0, &[2; 8192]).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 8192);
    let text = initiator.submit_and_wait(&[write], LONG).unwrap_err().to_string();
    assert!(text.contains("it is offered for reading only"), "{text}");
    assert_eq!(fs::read(&path).unwrap(), [1; 8192]);
}
