//! Which NICs may be used at all.

/// A list of the names of NICs that may be used, or all of them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DeviceFilter {
    /// None allows all.
    names: Vec<String>,
}

impl DeviceFilter {
    /// Allows all NICs.
    pub fn all() -> Self {
        Self::default()
    }

    /// Names with commas between, as `MC_TE_FILTERS` has them: `mlx5_0,mlx5_1`. White space around
    /// names does not count; without any name, and with `all`, all NICs are allowed.
    pub fn parse(text: &str) -> Self {
        if text.trim().eq_ignore_ascii_case("all") {
            return Self::all();
        }
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Self { names: names.map(str::to_owned).collect() }
    }

    /// Whether a NIC may be used.
    pub fn allows(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|allowed| allowed == name)
    }

    /// The names of the list that none of these NICs has: likely they are misspelt.
    pub fn unknown<'a>(&'a self, nics: &[String]) -> Vec<&'a str> {
        let names = self.names.iter().map(String::as_str);
        names.filter(|name| !nics.iter().any(|nic| nic == name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_allows_what_it_names() {
        let filter = DeviceFilter::parse(" mlx5_0 ,, mlx5_10,");
        for (name, allowed) in
            [("mlx5_0", true), ("mlx5_10", true), ("mlx5_1", false), ("", false), ("mlx5", false)]
        {
            assert_eq!(filter.allows(name), allowed, "{name:?}");
        }
        assert_eq!(filter.unknown(&["mlx5_0".to_owned(), "mlx5_1".to_owned()]), ["mlx5_10"]);
    }

    #[test]
    fn an_empty_list_and_all_allow_all() {
        for text in ["", " ", ",, ,", "all", " ALL "] {
            assert_eq!(DeviceFilter::parse(text), DeviceFilter::all(), "{text:?}");
        }
        // Among others it is a name.
        assert!(!DeviceFilter::parse("all,mlx5_0").allows("mlx5_1"));
        assert!(DeviceFilter::all().allows("mlx5_0"));
        assert!(DeviceFilter::all().unknown(&[]).is_empty());
    }
}
