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
    command.args([
        "allreduce",
        "--path=switch",
        "--fallback=off",
        &controller,
        "--group",
        group,
        &world,
        &rank,
        "--bind",
        &bind,
    ]);
    // Until the test ends it.
    command.args(["--size=256KiB", "--iters=100000000", "--timeout=600s"]);
    Running::start(&rank, &mut command)
}

/// Has answers about a group come when the test likes.
const HOLD_TRAINING: &str = "(() => {
    window.held = [];
    const real = window.fetch;
    window.fetch = async (path, options) => {
        const response = await real(path, options);
        if (path.endsWith('/training')) {
            await new Promise((release) => window.held.push(release));
        }
        return response;
    };
})()";

/// What no controller of this test has: circles, hosts with several ranks, and more than is shown.
fn graphs_of_any_kind_are_drawn(browser: &Browser) {
    // Two trees of opposite direction, and one that has two nodes on one switch.
    let height = browser.evaluate(
        "layOut(
            [...'abcdefgh'].map((key) => ({ key, width: 80 })),
            ['ab', 'ba', 'ac', 'ca', 'cc', 'bd'].map(([upper, lower]) => ({ upper, lower })),
        ).height",
    );
    // Three layers, of which the lowest is not as high.
    assert_eq!(height, 20 + 42 + 2 * 128);
    let text = |topology: &str, group: &str, selector: &str| {
        let show = format!("showNetwork({topology}, {group})");
        let found = format!("document.querySelector('#network {selector}').textContent");
        browser.evaluate(&format!("({show}, {found})"))
    };
    let many = "{
        switches: Array(300).fill({ name: 's', registered: true, addresses: [] }),
        hosts: Array(301).fill({ id: null, addresses: [] }),
        links: Array(302).fill({ upper: 0, lower_switch: null, lower_host: 0, rate_bits_per_second: null }),
    }";
    let rest = "Not shown: 44 more switches, 45 more hosts, 46 more links.";
    assert_eq!(text(many, "null", ".empty"), rest);
    let one = "{ switches: [], hosts: [{ id: null, addresses: ['10.0.0.1'] }], links: [] }";
    let members = "[0, 1].map((rank) => ({ rank, address: '10.0.0.1' }))";
    assert_eq!(text(one, &format!("{{ members: {members} }}"), ".title"), "host, ranks 0, 1");
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

    // Buttons outlive what is drawn anew, with the focus that they have.
    browser.evaluate("(window.first = document.querySelector('#groups button')).focus()");
    let collectives = || browser.texts("#groups td:nth-child(5)")[0].clone();
    let before = collectives();
    eventually("more collectives", || collectives() != before);
    assert_eq!(browser.evaluate("document.activeElement === window.first"), true);

    // What a slow request for another group brings is not drawn any more.
    browser.evaluate(HOLD_TRAINING);
    browser.evaluate("(chosen = 'training', window.old = refresh(), 0)");
    eventually("a request that is held", || browser.evaluate("held.length > 0") == true);
    browser.evaluate(choose);
    eventually("the other tree", || title() == format!("Tree of group {HOSTILE}"));
    browser.evaluate("held.forEach((release) => release())");
    let late = "window.old.then(() => document.getElementById('tree-title').textContent)";
    assert_eq!(browser.evaluate(late), format!("Tree of group {HOSTILE}"));

    graphs_of_any_kind_are_drawn(&browser);

    // A switch that has gone is not shown any more, nor is what it was part of.
    drop(daemons);
    eventually("no tree", || browser.texts("#network .switch").is_empty());
    assert_eq!(status(), "live");

    drop(controller);
    eventually("a controller that is away", || status() == "the controller cannot be reached");
    assert_eq!(browser.texts("body.stale").len(), 1);
}
