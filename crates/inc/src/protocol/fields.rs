//! How numbers of the data plane stand in JSON: as integers, refused when out of range.

/// A 24-bit queue pair number.
pub(crate) mod qpn {
    use millstream_wire::Qpn;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(qpn: &Qpn, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(qpn.value())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Qpn, D::Error> {
        let value = u32::deserialize(from)?;
        // 0 and 1 are the management queue pairs.
        if (2..1 << 24).contains(&value) {
            return Ok(Qpn::new(value));
        }
        Err(D::Error::custom(format_args!("{value} is no queue pair number: 2 to 16777215")))
    }
}

/// A 24-bit packet sequence number.
pub(super) mod psn {
    use millstream_wire::Psn;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(psn: &Psn, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(psn.value())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Psn, D::Error> {
        let value = u32::deserialize(from)?;
        if value < Psn::COUNT {
            return Ok(Psn::new(value));
        }
        Err(D::Error::custom(format_args!("{value} is no packet sequence number: up to 16777215")))
    }
}

/// A path MTU.
pub(crate) mod mtu {
    use millstream_wire::Mtu;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(mtu: &Mtu, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(mtu.bytes() as u64)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Mtu, D::Error> {
        let value = usize::deserialize(from)?;
        Mtu::from_bytes(value).ok_or_else(|| {
            D::Error::custom(format_args!("{value} is no path MTU: 256, 512, 1024, 2048 or 4096"))
        })
    }
}

/// A path MTU that need not be there.
pub(super) mod optional_mtu {
    use millstream_wire::Mtu;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize, Serialize)]
    struct Said(#[serde(with = "super::mtu")] Mtu);

    pub(in super::super) fn serialize<S: Serializer>(
        mtu: &Option<Mtu>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        mtu.map(Said).serialize(to)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Mtu>, D::Error> {
        Ok(Option::<Said>::deserialize(from)?.map(|Said(mtu)| mtu))
    }
}

/// Ranks: numbers, and pairs for the first and the last of several in a row.
pub(super) mod ranks {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::ranks::Ranks;
    use crate::spec::MAX_WORLD;

    #[derive(Deserialize, Serialize)]
    #[serde(untagged)]
    enum Run {
        One(u32),
        FirstAndLast([u32; 2]),
    }

    pub(in super::super) fn serialize<S: Serializer>(
        ranks: &Ranks,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(ranks.ranges().iter().map(|range| match range.end - range.start {
            1 => Run::One(range.start),
            _ => Run::FirstAndLast([range.start, range.end - 1]),
        }))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Ranks, D::Error> {
        let mut ranges = Vec::new();
        let mut next = 0;
        for run in Vec::<Run>::deserialize(from)? {
            let [first, last] = match run {
                Run::One(rank) => [rank, rank],
                Run::FirstAndLast(ends) => ends,
            };
            if first < next || last < first || last >= MAX_WORLD {
                let limit = MAX_WORLD - 1;
                return Err(D::Error::custom(format_args!(
                    "{first} to {last} are no ranks that follow those before: up to {limit}"
                )));
            }
            next = last + 1;
            ranges.push(first..next);
        }
        Ok(ranges.into_iter().collect())
    }
}
