//! Files that move between the kernel's device and ours: `millstream put` and `get`, with the
//! protocol `rdma:ibverbs` in the guest and `rdma:soft` here.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::guest::{Guest, OURS};
use super::row::{Process, await_that, finish, tail};
use crate::lab::Lab;

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
                copies(&program, "--protocol=rdma:ibverbs", "$segment")
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
                .args(["-c", &copies(&ours.display().to_string(), &soft, &segment)])
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
            let output = File::create(&log)?;
            let node = lab
                .command(ours)
                .args(NODE.split_whitespace())
                .args(["--protocol=rdma:soft", "--bind", OURS])
                .stdout(output.try_clone()?)
                .stderr(output)
                .spawn()
                .with_context(|| format!("cannot start {}", ours.display()))?;
            let mut node = Process(node);
            let said = || fs::read_to_string(&log).unwrap_or_default();
            let segment = await_segment(said, || node.ended().is_some())?;
            let copies = guest.start(&copies(&program, "--protocol=rdma:ibverbs", &segment))?;
            await_that(LIMIT, || copies.status().is_some());
            finish(&copies, stem)
        }
    }
}

/// Shell commands that copy a file of an odd length into a segment, at an odd offset, and out of it
/// again, and compare.
fn copies(program: &str, protocol: &str, segment: &str) -> String {
    let options = format!("--metadata=p2p {protocol} --segment={segment} --offset=7");
    format!(
        "set -e\nplace=$(mktemp -d)\nhead -c 3000001 /dev/urandom >$place/in\n\
         {program} put {options} $place/in\n\
         {program} get {options} --length=3000001 $place/out\n\
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
