//! What may be given with --bind.

use std::net::IpAddr;

use crate::failure::usage;

/// Refuses what no device can have, and what is given twice.
pub(crate) fn check(addresses: &[IpAddr]) -> anyhow::Result<()> {
    for (index, address) in addresses.iter().enumerate() {
        if address.is_unspecified() || address.is_multicast() {
            return Err(usage(format!(
                "--bind {address}: that is no address of one interface: give one that peers can \
                 reach (`millstream topology` lists this machine's)"
            )));
        }
        if addresses[..index].contains(address) {
            return Err(usage(format!(
                "--bind {address} is given twice: there is one device for each address"
            )));
        }
    }
    Ok(())
}
