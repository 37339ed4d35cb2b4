//! Which device: by name, or by address and provider.

use std::net::IpAddr;

use thiserror::Error;

use crate::{Device, IbverbsConfig, IbverbsError, OpenError, Provider, SoftConfig};

/// What names of soft devices start with.
const SOFT_PREFIX: &str = "soft-";

/// Which device to open, and what with.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Which.
    pub choice: DeviceChoice,
    /// What a soft device is opened with, but for the address.
    pub soft: SoftConfig,
    /// What a device of the system is opened with, but for name and address.
    pub ibverbs: IbverbsConfig,
}

/// Which device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DeviceChoice {
    /// The one with this name: `soft-` and a local address, or the system's name for it, such as
    /// `mlx5_0` or `rxe0`.
    Name(String),
    /// The one with this address, of this provider. With `None`, the system's where it has one with
    /// this address, else a soft one.
    Address(IpAddr, Option<Provider>),
}

/// Why a device could not be opened.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A soft device.
    #[error(transparent)]
    Soft(#[from] OpenError),
    /// A device of the system.
    #[error(transparent)]
    Ibverbs(#[from] IbverbsError),
    /// It looks like the name of a soft device.
    #[error("{0}: soft devices are named soft-ADDRESS, such as soft-127.0.0.1")]
    SoftName(String),
}

impl DeviceConfig {
    /// The defaults for this choice, with what the environment says (`MC_GID_INDEX`).
    pub fn new(choice: DeviceChoice) -> Result<Self, DeviceError> {
        // Its address is set when the device is opened.
        let soft = SoftConfig::new(IpAddr::from([127, 0, 0, 1]));
        Ok(Self { choice, soft, ibverbs: IbverbsConfig::from_environment()? })
    }
}

impl Device {
    /// Opens the device with this name: `soft-` and a local address, or the system's name for it,
    /// such as `mlx5_0` or `rxe0`. With `MC_GID_INDEX` as the environment has it.
    ///
    /// An error says which devices there are, or why there are none.
    pub fn open(name: &str) -> Result<Self, DeviceError> {
        Self::open_chosen(&DeviceConfig::new(DeviceChoice::Name(name.to_owned()))?)
    }

    /// Opens a device by name or address.
    pub fn open_chosen(config: &DeviceConfig) -> Result<Self, DeviceError> {
        let soft = |address| {
            let config = SoftConfig { address, ..config.soft.clone() };
            Self::open_soft(&config).map_err(DeviceError::Soft)
        };
        let ibverbs = |name, address| {
            Self::open_ibverbs(&IbverbsConfig { name, address, ..config.ibverbs.clone() })
        };
        match &config.choice {
            DeviceChoice::Name(name) => match soft_address(name) {
                Some(address) => soft(address?),
                None => Ok(ibverbs(Some(name.clone()), None)?),
            },
            &DeviceChoice::Address(address, provider) => match provider {
                Some(Provider::Soft) => soft(address),
                Some(Provider::Ibverbs) => Ok(ibverbs(None, Some(address))?),
                // No NIC has a loopback address: not worth loading the library.
                None if address.is_loopback() => soft(address),
                None => match ibverbs(None, Some(address)) {
                    Err(error) if is_absent(&error) => {
                        tracing::debug!(%address, %error, "a soft device, as the system has none");
                        soft(address)
                    }
                    result => Ok(result?),
                },
            },
        }
    }
}

/// The address in the name of a soft device, or why there is none in it; `None` when it is not the
/// name of one.
fn soft_address(name: &str) -> Option<Result<IpAddr, DeviceError>> {
    let address = name.strip_prefix(SOFT_PREFIX)?.parse();
    Some(address.map_err(|_| DeviceError::SoftName(name.to_owned())))
}

/// Whether the system just has no such device, which is no reason to do without a soft one.
fn is_absent(error: &IbverbsError) -> bool {
    matches!(
        error,
        IbverbsError::LibraryMissing { .. }
            | IbverbsError::NoDevice
            | IbverbsError::UnknownAddress { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_soft_devices() {
        let address = |name| soft_address(name).map(|address| address.ok());
        assert_eq!(address("soft-127.0.0.1"), Some("127.0.0.1".parse().ok()));
        assert_eq!(address("soft-2001:db8::1"), Some("2001:db8::1".parse().ok()));
        assert_eq!(address("soft-eth0"), Some(None));
        assert_eq!(address("mlx5_0"), None);
        assert_eq!(address("soft"), None);
        let error = soft_address("soft-").unwrap().unwrap_err().to_string();
        assert!(error.starts_with("soft-: ") && error.contains("soft-127.0.0.1"), "{error}");
    }

    #[test]
    fn what_is_only_absent_and_what_is_broken() {
        let (device, port) = (String::from("rxe0"), 1);
        assert!(is_absent(&IbverbsError::NoDevice));
        assert!(!is_absent(&IbverbsError::PortDown { device, port, state: "down" }));
    }
}
