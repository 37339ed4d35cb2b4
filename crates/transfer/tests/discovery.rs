//! Which devices an engine has that is told names, or none, in place of addresses.

mod common;

use common::{LONG, address, contents, devices, pattern, private, request, shared};
use millstream_transfer::{Config, InstallError, Opcode, RdmaConfig, TransferEngine};
use millstream_verbs::{Device, DeviceError, Provider};

fn named(names: &[String]) -> RdmaConfig {
    RdmaConfig { devices: Some(names.to_vec()), ..RdmaConfig::new(&[]) }
}

fn plain() -> TransferEngine {
    TransferEngine::new(Config::new([127, 0, 0, 1].into())).unwrap()
}

/// Of all that there are the system's devices in the guest, and none elsewhere.
#[test]
fn without_names_an_engine_has_the_systems_devices_that_work() {
    let engine = plain();
    let working = |name: &String| Device::open(name).is_ok();
    let mut works: Vec<_> = Device::list_ibverbs().unwrap_or_default();
    works.retain(working);
    assert!(!works.is_empty() || !devices::are_of_the_system());
    match engine.install_rdma(named(&[])) {
        Ok(()) => assert_eq!(engine.devices(), works),
        Err(InstallError::Open(DeviceError::Ibverbs(error))) => {
            assert!(works.is_empty(), "{works:?}, but {error}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn bytes_go_over_devices_that_are_named() {
    let name = || devices::open(address()).name().to_owned();
    let names = [name(), name()].map(|name| vec![name]);
    let [target, initiator] = names.clone().map(|names| {
        let engine = plain();
        engine.install_rdma(named(&names)).unwrap();
        assert_eq!(engine.devices(), names);
        engine
    });
    let (remote, local) = (shared(&target, 1 << 20), private(&initiator, 1 << 20));
    let bytes = pattern(1 << 20, 3);
    local.write(0, &bytes).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1 << 20);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert!(contents(&remote, 0, 1 << 20) == bytes);
}

#[test]
fn of_devices_that_are_named_those_that_work_are_taken_once() {
    let good = devices::open(address()).name().to_owned();
    let none = || "none9".to_owned();
    let engine = plain();
    engine.install_rdma(named(&[none(), good.clone(), good.clone()])).unwrap();
    assert_eq!(engine.devices(), std::slice::from_ref(&good));
    drop(engine);
    let refused = |config| plain().install_rdma(config).unwrap_err();
    let error = refused(named(&[none()]));
    assert!(matches!(error, InstallError::Open(DeviceError::Ibverbs(_))), "{error}");
    assert!(!devices::are_of_the_system() || error.to_string().contains("none9"), "{error}");
    // Soft devices that are asked for as such have addresses.
    let soft = RdmaConfig { provider: Some(Provider::Soft), ..named(&[good]) };
    assert!(matches!(refused(soft), InstallError::NoAddress));
}
