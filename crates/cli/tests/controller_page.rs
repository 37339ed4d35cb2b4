//! The page of a controller in a browser, of real switches and hosts.
//!
//! With `MILLSTREAM_UPDATE_SNAPSHOTS=1` in the environment the test writes the picture that the documentation
//! shows; look at it before it is committed.

mod browser;
mod common;

use std::fs;

use browser::Browser;
use common::{Running, address, eventually, millstream, skip};

const PICTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/images/controller.png");

/// The name of a group: text that would do harm as markup.
const HOSTILE: &str = "<img src=x onerror=\"document.title='harm'\">";

fn switch(controller: &str, name: &str) -> Running {
    let (controller, bind) = (format!("--controller={controller}"), address());
    let arguments = ["switch", &controller, "--name", name, "--bind", &bind];
    let mut switch = Running::start(name, millstream().args(arguments));
    switch.ready();
    switch
}

fn host(controller: &str, group: &str, world: u32, rank: u32) -> Running {
    let (controller, bind) = (format!("--controller={controller}"), address());
    let (world, rank) = (format!("--world={world}"), format!("--rank={rank}"));
    let mut command = millstream();
    command.args(["allreduce", &controller, "--group", group, &world, &rank, "--bind", &bind]);
    // Until the test ends it.
    command.args(["--size=256KiB", "--iters=100000000", "--timeout=600s"]);
    Running::start(&rank, &mut command)
}

#[test]
fn switches_ranks_and_what_moves_are_on_the_page() {
    let Some(browser) = Browser::start((1240, 1340)) else {
        return skip("chromium and chromedriver are not installed");
    };
    let at = address();
    let (listen, http) = (format!("{at}:0"), format!("{at}:0"));
    let arguments = ["controller", "--listen", &listen, "--fan-in=2", "--http", &http];
    let mut controller = Running::start("controller", millstream().args(arguments));
    let ready = controller.ready();
    let text = |key: &str| ready[key].as_str().unwrap().to_owned();
    let (listen, http) = (text("listen"), text("http"));

    browser.open(&format!("http://{http}/"));
    let status = || browser.texts("#status").concat();
    eventually("an empty page", || status() == "live; nothing is here yet");
    assert_eq!(browser.texts("#network .empty"), ["No switch has registered yet."]);

    let daemons = ["s0", "s1", "s2"].map(|name| switch(&listen, name));
    let _hosts = [0, 1, 2, 3].map(|rank| host(&listen, "training", 4, rank));
    // Two leaves below a root, and two hosts below each.
    let busy = || browser.texts("#tree .edge.busy").len();
    eventually("rates on all edges", || busy() == 6 && browser.texts("#tree .label").len() == 6);
    assert_eq!(status(), "live");
    let mut switches = browser.texts("#tree .switch text.title");
    switches.sort();
    assert_eq!(switches, ["s0", "s1", "s2"]);
    let mut hosts = browser.texts("#tree .host text.title");
    hosts.sort();
    assert_eq!(hosts, ["rank 0", "rank 1", "rank 2", "rank 3"]);
    for label in browser.texts("#tree .label") {
        assert!(label.contains('\u{2191}') && label.contains("B/s"), "{label}");
    }
    assert_eq!(browser.texts("#network .edge.used").len(), 6);
    assert_eq!(browser.texts("#edges tbody tr").len(), 6);
    assert_eq!(browser.texts("#groups tbody tr[aria-selected=true] button"), ["training"]);
    if std::env::var_os("MILLSTREAM_UPDATE_SNAPSHOTS").is_some_and(|value| value == "1") {
        fs::write(PICTURE, browser.screenshot()).unwrap();
    }

    // Names are text, whatever they are.
    let _stranger = host(&listen, HOSTILE, 2, 1);
    eventually("the other group", || browser.texts("#groups button").len() == 2);
    let choose = "document.querySelectorAll('#groups button')[1].click()";
    browser.evaluate(choose);
    let title = || browser.texts("#tree-title").concat();
    eventually("its tree", || title() == format!("Tree of group {HOSTILE}"));
    assert_eq!(browser.texts("#groups button"), ["training", HOSTILE]);
    let waits = browser.texts("#tree .empty").concat();
    assert_eq!(waits, "The group has no tree yet. It waits for rank 0.");
    assert_eq!(browser.texts("img, main script"), Vec::<String>::new());
    assert_eq!(browser.evaluate("document.title"), "Millstream controller");

    // A switch that has gone is not shown any more, nor is what it was part of.
    drop(daemons);
    eventually("no tree", || browser.texts("#network .switch").is_empty());
    assert_eq!(status(), "live");

    drop(controller);
    eventually("a controller that is away", || status() == "the controller cannot be reached");
    assert_eq!(browser.texts("body.stale").len(), 1);
}
