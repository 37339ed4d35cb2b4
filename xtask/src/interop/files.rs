//! Files that move between the kernel's device and ours: `millstream put` and `get`, with the
//! protocol `rdma:ibverbs` in the guest and `rdma:soft` here.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::guest::Guest;
use super::lab::Lab;
use super::link::OURS;
use super::row::{Process, await_that, finish, tail};

/// For one side's commands.
const LIMIT: Duration = Duration::from_secs(60);

/// Where the node is whose memory the file goes to and comes from.
#[derive(Clone, Copy)]
pub(super) enum Node {
    /// In the guest, and so is who copies.
    Same,
    /// In the guest; copies are made from here.
    Guest,
    /// Here; copies are made from the guest.
    Ours,
    /// One in the guest and one here, and copies are made from both sides at the same time: here, three
    /// processes have one address.
    Both,
}

/// A node, and what names it to others when it is ready.
const NODE: &str = "node --name=n --metadata=p2p --buffer=4MiB";

/// Runs the row. What both sides print goes to `STEM.ours.log` and `STEM.kernel.log`.
pub(super) fn run(
    lab: &Lab,
    guest: &mut Guest,
    ours: &Path,
    stem: &Path,
    node: Node,
) -> Result<()> {
    let program = format!("/host/{}", guest.lend(ours)?);
    let log = stem.with_extension("ours.log");
    let _ = fs::remove_file(&log);
    match node {
        Node::Same => {
            let both = format!(
                "{program} {NODE} --protocol=rdma:ibverbs >/tmp/node & node=$!\n\
                 until grep -q ready /tmp/node || [ ! -e /proc/$node ]; do usleep 20000; done\n\
                 segment=$(sed 's/.*\"segment\":\"\\([^\"]*\\)\".*/\\1/' /tmp/node)\n\
                 {}kill $node\nwait $node",
                copies(&program, "--protocol=rdma:ibverbs", "$segment", WHOLE)
            );
            let both = guest.start(&both)?;
            await_that(LIMIT, || both.status().is_some());
            finish(&both, stem)
        }
        Node::Guest => {
            let node = guest.start(&format!("exec {program} {NODE} --protocol=rdma:ibverbs"))?;
            let segment = await_segment(|| node.output(), || node.status().is_some())?;
            let soft = format!("--protocol=rdma:soft --bind={OURS}");
            let output = File::create(&log)?;
            let copies = lab
                .command("sh")
                .args(["-c", &copies(&ours.display().to_string(), &soft, &segment, WHOLE)])
                .stdout(output.try_clone()?)
                .stderr(output)
                .status()?;
            node.stop()?;
            finish(&node, stem)?;
            if !copies.success() {
                bail!("the copies ended with {copies}: {}", tail(&fs::read_to_string(&log)?));
            }
            Ok(())
        }
        Node::Ours => {
            let (mut node, segment) = start_node(lab, ours, &log)?;
            let copies =
                guest.start(&copies(&program, "--protocol=rdma:ibverbs", &segment, WHOLE))?;
            await_that(LIMIT, || copies.status().is_some() || node.ended().is_some());
            finish(&copies, stem)
        }
        Node::Both => {
            let (_node, segment) = start_node(lab, ours, &log)?;
            let theirs = format!(
                "{program} {NODE} --protocol=rdma:ibverbs & node=$!\ntrap 'kill $node' TERM\n\
                 ({})\necho copied $?\nwait $node\nwait $node",
                copies(&program, "--protocol=rdma:ibverbs", &segment, WHOLE)
            );
            let theirs = guest.start(&theirs)?;
            let segment = await_segment(|| theirs.output(), || theirs.status().is_some())?;
            let soft = format!("--protocol=rdma:soft --bind={OURS}");
            let half = |half| copies(&ours.display().to_string(), &soft, &segment, half);
            let halves =
                format!("({}) & half=$!\n({}) && wait $half", half(HALVES[0]), half(HALVES[1]));
            let output = File::options().append(true).open(&log)?;
            let copies = lab
                .command("sh")
                .args(["-c", &halves])
                .stdout(output.try_clone()?)
                .stderr(output)
                .status()?;
            let copied = || theirs.output().lines().any(|line| line == "copied 0");
            let theirs_copied = await_that(LIMIT, copied);
            theirs.stop()?;
            finish(&theirs, stem)?;
            if !copies.success() {
                bail!("the copies ended with {copies}: {}", tail(&fs::read_to_string(&log)?));
            }
            if !theirs_copied {
                bail!("the kernel's side has not copied: {}", tail(&theirs.output()));
            }
            Ok(())
        }
    }
}

/// Starts a node here.
fn start_node(lab: &Lab, ours: &Path, log: &Path) -> Result<(Process, String)> {
    let output = File::create(log)?;
    let node = lab
        .command(ours)
        .args(NODE.split_whitespace())
        .args(["--protocol=rdma:soft", "--bind", OURS])
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("cannot start {}", ours.display()))?;
    let mut node = Process(node);
    let said = || fs::read_to_string(log).unwrap_or_default();
    let segment = await_segment(said, || node.ended().is_some())?;
    Ok((node, segment))
}

/// Where in a segment, and how many bytes: odd numbers.
const WHOLE: (u32, u32) = (7, 3_000_001);
const HALVES: [(u32, u32); 2] = [(9, 1_500_003), (2_000_001, 1_500_001)];

/// Shell commands that copy a file into a segment and out of it again, and compare.
fn copies(program: &str, protocol: &str, segment: &str, (offset, length): (u32, u32)) -> String {
    let options = format!("--metadata=p2p {protocol} --segment={segment} --offset={offset}");
    format!(
        "set -e\nplace=$(mktemp -d)\nhead -c {length} /dev/urandom >$place/in\n\
         {program} put {options} $place/in\n\
         {program} get {options} --length={length} $place/out\n\
         cmp $place/in $place/out\nrm -r $place\n"
    )
}

/// The segment in what a node says when it is ready.
fn await_segment(said: impl Fn() -> String, mut ended: impl FnMut() -> bool) -> Result<String> {
    let mut found = None;
    await_that(LIMIT, || {
        found = segment(&said());
        found.is_some() || ended()
    });
    found.with_context(|| format!("the node is not ready: {}", tail(&said())))
}

fn segment(said: &str) -> Option<String> {
    let ready = said.lines().find_map(|line| line.strip_prefix("ready "))?;
    let ready: serde_json::Value = serde_json::from_str(ready).ok()?;
    ready["segment"].as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_segment_is_found_in_what_a_node_says() {
        let said = "a warning\nready {\"name\":\"n\",\"segment\":\"10.91.0.2:77\"}\n";
        assert_eq!(segment(said), Some("10.91.0.2:77".to_owned()));
        // Half of a line.
        assert_eq!(segment("ready {\"segment\":\"10."), None);
    }
}
