//! The transfer engine's tests on the kernel's soft-RoCE: each is a row, and runs in the guest by itself.
//!
//! The guest gets eight devices for them, joined as by a switch, so that engines have several NICs.

mod table;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use super::guest::Guest;
use super::row::{await_that, finish, print_end};
use crate::{process, programs};

/// What the names of these rows begin with.
pub(super) const PREFIX: &str = "transfer, ";

/// For a test. Where the guest is emulated, those with thousands of connections or hundreds of processes take minutes.
const LIMIT: Duration = Duration::from_secs(900);
const SETUP_LIMIT: Duration = Duration::from_secs(30);

const NICS: &str = include_str!("nics.sh");
/// How many peers are dead at once, and NICs of each: what an emulated processor can serve.
const DEAD: &str = "4x2";
/// The devices that the script makes.
const DEVICES: &str = "ibverbs:rxe1,rxe2,rxe3,rxe4,rxe5,rxe6,rxe7,rxe8";

/// A test of the suite.
pub(super) struct Test {
    /// `transfer, FILE::TEST`.
    pub(super) name: String,
    program: PathBuf,
    test: String,
}

/// What is to be run.
#[derive(Default)]
pub(super) struct Tests {
    pub(super) run: Vec<Test>,
    /// What is never run here, `FILE::TEST`, each with the reason.
    pub(super) not_run: Vec<(String, &'static str)>,
}

/// The tests whose rows' names contain `text`, if it begins as they do; without one, those that are
/// always run. For others they are not even built.
pub(super) fn choose(text: &str) -> Result<Tests> {
    if !text.is_empty() && !text.starts_with(PREFIX.trim_end_matches(", ")) {
        return Ok(Tests::default());
    }
    let all = all()?;
    table::check(&all.iter().map(|test| &test.name[PREFIX.len()..]).collect::<Vec<_>>())?;
    let mut tests = Tests::default();
    for test in all {
        let name = &test.name[PREFIX.len()..];
        match (text.is_empty(), table::why_not(name)) {
            (true, _) if !table::ALWAYS.contains(&name) => {}
            (false, _) if !test.name.contains(text) => {}
            (_, Some(why)) => tests.not_run.push((name.to_owned(), why)),
            (_, None) => tests.run.push(test),
        }
    }
    Ok(tests)
}

/// All tests of the suite.
fn all() -> Result<Vec<Test>> {
    let mut all = Vec::new();
    for program in programs::tests_of("millstream-transfer")? {
        let list = process::output(Command::new(&program.path).arg("--list"))?;
        let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
        all.extend(tests.map(|test| Test {
            name: format!("{PREFIX}{}::{test}", program.name),
            program: program.path.clone(),
            test: test.to_owned(),
        }));
    }
    ensure!(!all.is_empty(), "cargo named no test of millstream-transfer");
    Ok(all)
}

/// Makes the guest's devices, unless they are there.
pub(super) fn set_up(guest: &mut Guest, stem: &Path) -> Result<()> {
    let made = guest.start(NICS)?;
    await_that(SETUP_LIMIT, || made.status().is_some());
    finish(&made, stem)
}

impl Test {
    /// Runs it. What it prints goes to `STEM.kernel.log`.
    pub(super) fn run(&self, guest: &mut Guest, stem: &Path) -> Result<()> {
        let program = guest.lend(&self.program)?;
        let emulated = if guest.is_emulated { "MILLSTREAM_TEST_EMULATED=1 " } else { "" };
        let test = guest.start(&format!(
            "{emulated}RUST_BACKTRACE=1 MILLSTREAM_REQUIRE=all MILLSTREAM_TEST_CUT_LINKS=1 \
             MILLSTREAM_TEST_DEVICES={DEVICES} MILLSTREAM_TEST_DEAD={DEAD} exec ./{program} --exact {} --nocapture",
            self.test
        ))?;
        await_that(LIMIT, || test.status().is_some());
        finish(&test, stem).inspect_err(|_| print_end(&test.output()))?;
        // Of a name that it does not know, a test program runs nothing, and is content.
        if !test.output().contains("1 passed") {
            bail!("it ran no test");
        }
        Ok(())
    }
}
