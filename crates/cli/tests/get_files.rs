//! What `get` leaves behind: the new file or the old one, and nothing else.

mod common;

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{Folder, Running, bytes, eventually, millstream, node, skip, towards, transfer};
use millstream_transfer::{Config, RdmaConfig, TransferEngine};

/// Names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_file_is_replaced_with_its_mode_and_through_its_links() {
    let folder = Folder::new();
    let (old, link, new) = (folder.file("old"), folder.file("link"), folder.file("new"));
    fs::write(&old, bytes(3_000_000, 1)).unwrap();
    fs::set_permissions(&old, Permissions::from_mode(0o640)).unwrap();
    symlink("old", &link).unwrap();
    let before = fs::metadata(&old).unwrap().ino();
    let (_node, segment) = node("1MiB", &[]);
    transfer(&["get"], &segment, &["--length=1000", &link]).success();
    let after = fs::metadata(&old).unwrap();
    assert_eq!(fs::read(&old).unwrap(), [0; 1000]);
    assert_eq!(after.permissions().mode() & 0o7777, 0o640);
    assert_ne!(after.ino(), before, "another file has its name");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());

    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_millstream");
    command.args(["-c", "umask 027; exec \"$@\"", "sh", program, "get"]);
    command.args(towards(&segment)).arg(&new);
    Running::start("get", &mut command).output().success();
    assert_eq!(fs::metadata(&new).unwrap().permissions().mode() & 0o7777, 0o640);
    assert_eq!(names(folder.path()), ["link", "new", "old"]);

    symlink("nothing", folder.file("dangling")).unwrap();
    let output = transfer(&["get"], &segment, &[&folder.file("dangling")]);
    assert!(output.failure(1).contains("symbolic link to what is not there"), "{}", output.stderr);
}

#[test]
fn in_place_the_file_stays_and_gets_its_length() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, bytes(3_000_000, 1)).unwrap();
    let before = fs::metadata(&file).unwrap().ino();
    let (_node, segment) = node("1MiB", &[]);
    // Zeros are written over what was there.
    transfer(&["get"], &segment, &["--inplace", "--verify", &file]).success();
    assert_eq!(fs::metadata(&file).unwrap().ino(), before);
    assert!(fs::read(&file).unwrap() == vec![0; 1 << 20]);
    transfer(&["get"], &segment, &["--inplace", "--length=0", &file]).success();
    assert_eq!(fs::metadata(&file).unwrap().len(), 0);
}

#[test]
fn blocks_of_zeros_become_holes_and_holes_become_zeros() {
    let folder = Folder::new();
    let (sparse, copy) = (folder.file("sparse"), folder.file("copy"));
    let mut content = vec![0; 16 << 20];
    content[5_000_000..5_000_100].fill(7);
    let last = content.len() - 1;
    content[last] = 9;
    fs::write(&sparse, &content).unwrap();
    let (_node, segment) = node("16MiB", &[]);
    // Old bytes in the segment must not show through.
    fs::write(&copy, vec![0xff; 16 << 20]).unwrap();
    transfer(&["put"], &segment, &[&copy]).success();
    let holes = fs::File::create(&sparse).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, &[7; 100], 5_000_000).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, &[9], last as u64).unwrap();
    transfer(&["put"], &segment, &[&sparse]).success();
    for length in [content.len(), content.len() - 1, 4097] {
        transfer(&["get"], &segment, &["--verify", &format!("--length={length}"), &copy]).success();
        assert!(fs::read(&copy).unwrap() == content[..length]);
    }
    transfer(&["get"], &segment, &[&copy]).success();
    let blocks = fs::metadata(&copy).unwrap().blocks();
    assert!(blocks * 512 < 1 << 20, "{blocks} blocks of 512 bytes");
}

/// Ends a `get` over an existing file when half of it is written; returns its end and what is in
/// the folder.
fn interrupted(signal: &str) -> (common::Output, Vec<String>) {
    let folder = Folder::new();
    let file = folder.file("file");
    let old = bytes(1000, 1);
    fs::write(&file, &old).unwrap();
    let (node, segment) = node("256MiB", &[]);
    let mut command = millstream();
    command.arg("get").args(towards(&segment)).arg(&file);
    let get = Running::start("get", &mut command);
    eventually("it has begun", || names(folder.path()).len() == 2);
    // Without its node it cannot be done too early.
    node.signal("STOP");
    get.signal(signal);
    let output = get.output();
    assert!(fs::read(&file).unwrap() == old, "the old file is whole");
    (output, names(folder.path()))
}

#[test]
fn told_to_stop_it_leaves_the_old_file_and_nothing_else() {
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        let (output, names) = interrupted(signal);
        assert_eq!(output.status.signal(), Some(number), "{}", output.stderr);
        assert_eq!(names, ["file"]);
        assert_eq!(output.stderr, "");
    }
}

#[test]
fn nohup_outlives_a_hangup() {
    let folder = Folder::new();
    let fifo = folder.file("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let (_node, segment) = node("64MiB", &[]);
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_millstream"), "get"]);
    let get = Running::start("get", command.args(towards(&segment)).arg(&fifo));
    let mut reader = fs::File::open(&fifo).unwrap();
    reader.read_exact(&mut [0]).unwrap();
    get.signal("HUP");
    assert_eq!(reader.read_to_end(&mut Vec::new()).unwrap(), (64 << 20) - 1);
    get.output().success();
}

#[test]
fn killed_it_leaves_the_old_file_and_a_temporary_one() {
    let (output, names) = interrupted("KILL");
    assert_eq!(output.status.signal(), Some(9));
    assert_eq!(names.len(), 2);
    assert!(names[0].starts_with(".file.millstream-"), "{names:?}");
}

#[test]
fn a_segment_that_changes_while_it_is_compared_leaves_the_old_file() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, "old").unwrap();
    let address = common::address().parse().unwrap();
    let engine = TransferEngine::new(Config::new(address)).unwrap();
    engine.install_rdma(RdmaConfig::new(&[address])).unwrap();
    let buffer = engine.allocate_buffer(10 << 20, "*", true).unwrap();
    let done = AtomicBool::new(false);
    let output = thread::scope(|scope| {
        scope.spawn(|| {
            let mut count = 0_u64;
            while !done.load(Ordering::Relaxed) {
                count += 1;
                buffer.write(0, &count.to_le_bytes()).unwrap();
            }
        });
        let output = transfer(&["get"], engine.name(), &["--verify", &file]);
        done.store(true, Ordering::Relaxed);
        output
    });
    assert!(output.failure(1).contains("changed meanwhile: CRC-32C "), "{}", output.stderr);
    assert_eq!(fs::read(&file).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_full_disk_leaves_the_old_file() {
    let folder = Folder::new();
    let (original, disk) = (folder.file("original"), folder.file("disk"));
    fs::write(&original, bytes(3 << 20, 4)).unwrap();
    fs::create_dir(&disk).unwrap();
    let (_node, segment) = node("3MiB", &[]);
    transfer(&["put"], &segment, &[&original]).success();
    // The disk is there for this shell only, and goes away with it.
    let script = "mount -t tmpfs -o size=1m none \"$1\" || exit 77; cd \"$1\"; shift
        echo old >file
        \"$@\" file; echo \"status $?\"
        \"$@\" --inplace file; echo \"status $?\"
        ls -A; head -c 3 file | od -c | head -1";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh", &disk, env!("CARGO_BIN_EXE_millstream")]);
    command.arg("get").args(towards(&segment));
    let Ok(output) = command.output() else { return skip("unshare is not installed") };
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !stdout.starts_with("status") {
        return skip(&format!("no file system can be mounted here: {stderr}"));
    }
    let errors: Vec<&str> = stderr.lines().collect();
    assert_eq!(errors.len(), 2, "{stderr}");
    assert!(errors[0].contains("and file is as it was: cannot write file: No space"), "{stderr}");
    // In place, what was written is said: all that the disk holds, in pages.
    let fits = (1 << 20) - 4096;
    assert!(
        [fits, 1 << 20].iter().any(|fits| errors[1].contains(&format!("after {fits} of 3145728"))),
        "{stderr}"
    );
    assert!(stdout.starts_with("status 1\nstatus 1\nfile\n"), "{stdout}");
}
