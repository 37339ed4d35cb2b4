//! The system's RDMA devices, and what can be used of them.
//!
//! `cargo run -p millstream-verbs --example devices`

use std::error::Error;

use millstream_verbs::{Device, IbverbsConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let names = Device::list_ibverbs()?;
    if names.is_empty() {
        println!("no device");
    }
    for name in names {
        let config = IbverbsConfig { name: Some(name.clone()), ..IbverbsConfig::default() };
        match Device::open_ibverbs(&config) {
            Ok(device) => {
                let (address, gid) = (device.address(), device.gid());
                let mtu = device.path_mtu(address)?.bytes();
                println!("{name}: {address} (GID {gid}), path MTU {mtu}");
                println!("  {:?}", device.attributes());
                println!("  {:?}", device.counters());
            }
            Err(error) => println!("{name}: {error}"),
        }
    }
    Ok(())
}
