//! Throughput by loss and window, and by connections through a bottleneck, as it was when it was
//! last looked at.
//!
//! A change of the endpoint that changes how it recovers or paces itself shows here as a diff.
//! With `MILLSTREAM_UPDATE_SNAPSHOTS=1` in the environment the test writes the new table; look at
//! the diff before committing it.

use std::path::Path;

use millstream_sim::scenarios::{Parameters, run};

#[test]
fn throughput_by_loss_and_window() {
    snapshot("grid");
}

#[test]
fn throughput_by_connections_through_a_bottleneck() {
    snapshot("congestion");
}

/// Eight round trips in a row fail, once the timer has backed off to its limit.
#[test]
fn no_number_of_losses_in_a_row_ends_a_connection() {
    let parameters = Parameters { seed: 2_868_903_995_839_110_128, ..Parameters::default() };
    let report = run("grid", &parameters, None).unwrap();
    assert!(report.passed(), "{report}");
}

fn snapshot(scenario: &str) {
    let report = run(scenario, &Parameters::default(), None).unwrap();
    assert!(report.passed(), "{report}");
    // Without digest and packet counts, which any change of any header would change.
    let found = format!("{}\n{}", report.what, report.table.unwrap());
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/snapshots/{scenario}.txt"));
    if std::env::var_os("MILLSTREAM_UPDATE_SNAPSHOTS").is_some_and(|value| value == "1") {
        std::fs::write(&path, found).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    assert!(
        found.trim_end() == expected.trim_end(),
        "{scenario} has changed; MILLSTREAM_UPDATE_SNAPSHOTS=1 accepts it\n\
         was:\n{expected}\nis:\n{found}"
    );
}
