//! What only devices of the system have: names, ports, a GID table. Each test says something on
//! every machine, with and without such devices.

use std::net::IpAddr;

use millstream_verbs::{
    Device, DeviceChoice, DeviceConfig, DeviceError, IbverbsConfig, IbverbsError, Provider,
};

fn named(name: &str) -> IbverbsConfig {
    IbverbsConfig { name: Some(name.to_owned()), ..IbverbsConfig::default() }
}

#[test]
fn what_is_listed_is_what_can_be_opened() {
    match Device::list_ibverbs() {
        Ok(names) => {
            for name in &names {
                match Device::open_ibverbs(&named(name)) {
                    Ok(device) => {
                        assert_eq!(device.name(), name);
                        assert_eq!(device.provider(), Provider::Ibverbs);
                    }
                    // It is known, and something about it is wrong.
                    Err(error) => assert!(error.to_string().contains(name.as_str()), "{error}"),
                }
            }
            let error = Device::open_ibverbs(&named("no-such-device")).unwrap_err();
            match error {
                IbverbsError::NoDevice => assert_eq!(names.len(), 0),
                IbverbsError::UnknownDevice { name, available } => {
                    assert_eq!((name.as_str(), available), ("no-such-device", names));
                }
                other => panic!("{other}"),
            }
        }
        // Opening says the same.
        Err(error) => {
            assert!(matches!(error, IbverbsError::LibraryMissing { .. }), "{error}");
            let opened = Device::open_ibverbs(&IbverbsConfig::default()).unwrap_err();
            assert_eq!(opened.to_string(), error.to_string());
        }
    }
}

#[test]
fn a_port_or_gid_that_is_not_there_is_refused_by_its_number() {
    // Devices that work; where there is none, there is nothing to refuse.
    for name in Device::list_ibverbs().unwrap_or_default() {
        if Device::open_ibverbs(&named(&name)).is_err() {
            continue;
        }
        for port in [0, 77] {
            let error = Device::open_ibverbs(&IbverbsConfig { port, ..named(&name) }).unwrap_err();
            assert!(
                matches!(&error, IbverbsError::NoSuchPort { device, port: p, ports }
                    if *device == name && *p == port && *ports >= 1),
                "{error}"
            );
        }
        let config = IbverbsConfig { gid_index: Some(255), ..named(&name) };
        let error = Device::open_ibverbs(&config).unwrap_err();
        let IbverbsError::UnsuitableGid { index: 255, usable, .. } = &error else {
            panic!("{error}");
        };
        for &index in usable {
            let config = IbverbsConfig { gid_index: Some(index), ..named(&name) };
            let device = Device::open_ibverbs(&config).unwrap();
            assert!(!device.address().is_unspecified());
        }
    }
}

#[test]
fn a_device_is_chosen_by_its_name() {
    let error = Device::open("soft-somewhere").unwrap_err();
    assert!(matches!(error, DeviceError::SoftName(_)), "{error}");
    // Not of this machine: an error of the soft provider, which is what matters here.
    let error = Device::open("soft-192.0.2.1").unwrap_err();
    assert!(matches!(error, DeviceError::Soft(_)), "{error}");
    let error = Device::open("no-such-device").unwrap_err();
    assert!(matches!(error, DeviceError::Ibverbs(_)), "{error}");
    for name in Device::list_ibverbs().unwrap_or_default() {
        if let Ok(device) = Device::open(&name) {
            assert_eq!((device.name(), device.provider()), (name.as_str(), Provider::Ibverbs));
        }
    }
}

#[test]
fn a_device_is_chosen_by_its_address() {
    let chosen = |address, provider| {
        let choice = DeviceChoice::Address(address, provider);
        Device::open_chosen(&DeviceConfig::new(choice).unwrap())
    };
    // Of documentation, so that no device has it.
    let nobody = IpAddr::from([192, 0, 2, 1]);
    let error = chosen(nobody, Some(Provider::Ibverbs)).unwrap_err();
    match Device::list_ibverbs() {
        Ok(names) if !names.is_empty() => {
            let text = error.to_string();
            assert!(names.iter().all(|name| text.contains(name)), "{text}");
        }
        _ => assert!(matches!(error, DeviceError::Ibverbs(_)), "{error}"),
    }
    // Any provider: the soft one is what is left.
    let error = chosen(nobody, None).unwrap_err();
    assert!(matches!(error, DeviceError::Soft(_)), "{error}");
    for name in Device::list_ibverbs().unwrap_or_default() {
        let Ok(device) = Device::open(&name) else { continue };
        for provider in [None, Some(Provider::Ibverbs)] {
            let found = chosen(device.address(), provider).unwrap();
            assert_eq!(found.provider(), Provider::Ibverbs);
            assert_eq!(found.address(), device.address());
        }
    }
}
