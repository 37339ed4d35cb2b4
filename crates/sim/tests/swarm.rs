//! Random options, many seeds. A seed that fails here is a bug; `millstream sim --scenario swarm
//! --seed N` shows it again.

use millstream_sim::scenarios::{Parameters, run};

#[test]
fn whatever_the_options_are() {
    for seed in 0..150 {
        let report = run("swarm", &Parameters { seed, ..Parameters::default() }, None).unwrap();
        assert!(report.passed(), "{report}");
    }
}
