//! Ranks that are processes, to be killed and stopped. Each is the test program again, told by its environment which one
//! it is, and by its stdin what to do.

use std::env;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Set in processes that tests start: words that say which rank it is.
const PART: &str = "MILLSTREAM_RANK_OF_A_TEST";

/// A process that does what the test `part_of_another_test` of this program does. Dropped, it is killed.
pub(crate) struct Rank {
    pub(crate) child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    pub(crate) fn start(words: &str) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "part_of_another_test", "--nocapture"]).env(PART, words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, stdin, lines }
    }

    /// All of a group, once they have joined.
    pub(crate) fn start_all(world: u32, words: impl Fn(u32) -> String) -> Vec<Self> {
        let mut ranks: Vec<Self> = (0..world).map(|rank| Self::start(&words(rank))).collect();
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "joined");
        }
        ranks
    }

    pub(crate) fn say(&mut self, what: &str) {
        writeln!(self.stdin, "{what}").unwrap();
    }

    pub(crate) fn hear(&mut self) -> String {
        let answer = |line: String| line.strip_prefix("> ").map(str::to_owned);
        self.lines.find_map(|line| answer(line.unwrap())).expect("the rank has ended")
    }

    /// Sends it a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The words of this process, if it is a rank.
pub(crate) fn words() -> Option<Vec<String>> {
    let words = env::var(PART).ok()?;
    Some(words.split(' ').map(str::to_owned).collect())
}

/// Says something on a line that the test harness has no part in.
pub(crate) fn answer(what: &str) {
    println!("\n> {what}");
}
