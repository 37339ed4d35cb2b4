//! What the threads of a process are at that does not end.

use std::fs;

/// A line for each thread: its name and state, the place in the kernel where it sleeps, the system call with its
/// arguments, the stack pointer and the program counter.
pub(super) fn of(process: u32) -> String {
    let Ok(folder) = fs::read_dir(format!("/proc/{process}/task")) else {
        return "  it has ended meanwhile".to_owned();
    };
    let mut lines: Vec<String> = folder
        .flatten()
        .map(|task| {
            let field = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let (stat, name) = (field("stat"), field("comm"));
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').next());
            let (place, call) = (field("wchan"), field("syscall"));
            let [name, place, call] = [&name, &place, &call].map(|text| text.trim());
            format!("  {name}: {}, {place}, {call}", state.unwrap_or("gone"))
        })
        .collect();
    lines.sort();
    lines.join("\n")
}

/// Of what the guest says of itself, what its threads are at.
pub(super) fn first_part(state: &str) -> &str {
    state.split("\n\n").next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_is_seen_to_wait() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let waiting = std::thread::Builder::new().name("waits".to_owned());
        let waiting = waiting.spawn(move || receiver.recv()).unwrap();
        let start = std::time::Instant::now();
        let waits = || of(std::process::id()).lines().any(|line| line.starts_with("  waits: S, "));
        while !waits() {
            assert!(start.elapsed().as_secs() < 60, "{}", of(std::process::id()));
            std::thread::yield_now();
        }
        drop(sender);
        waiting.join().unwrap().unwrap_err();
        assert_eq!(of(u32::MAX), "  it has ended meanwhile");
    }

    #[test]
    fn the_first_part_ends_at_an_empty_line() {
        assert_eq!(first_part("threads\n  a: S\n\ncounters\n"), "threads\n  a: S");
        assert_eq!(first_part("the guest has ended"), "the guest has ended");
    }
}
