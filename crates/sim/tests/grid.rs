//! The grid of throughput by loss and window, as it was when it was last looked at.
//!
//! A change of the endpoint that changes how it recovers or paces itself shows here as a diff.
//! With `MILLSTREAM_UPDATE_SNAPSHOTS=1` in the environment the test writes the new table; look at
//! the diff before committing it.

use std::path::Path;

use millstream_sim::scenarios::{Parameters, run};

#[test]
fn throughput_by_loss_and_window() {
    let report = run("grid", &Parameters::default(), None).unwrap();
    assert!(report.passed(), "{report}");
    // Without digest and packet counts, which any change of any header would change.
    let found = format!("{}\n{}", report.what, report.table.unwrap());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/grid.txt");
    if std::env::var_os("MILLSTREAM_UPDATE_SNAPSHOTS").is_some_and(|value| value == "1") {
        std::fs::write(&path, found).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    assert!(
        found.trim_end() == expected.trim_end(),
        "the grid has changed; MILLSTREAM_UPDATE_SNAPSHOTS=1 accepts it\n\
         was:\n{expected}\nis:\n{found}"
    );
}
