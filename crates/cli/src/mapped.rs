//! `--map-file`: where other servers have the files that a node offers.

use std::path::Path;

use millstream_transfer::FileOptions;

use crate::failure::usage;

/// How each of the files is offered: with its paths by the names of servers.
pub(crate) fn maps(arguments: &[String], offered: &[&Path]) -> anyhow::Result<Vec<FileOptions>> {
    let mut maps = vec![FileOptions::default(); offered.len()];
    for text in arguments {
        let refuse = |why: &str| usage(format!("--map-file {text:?}: {why}"));
        // A path may have an @ and a = itself: which one it is, the files that are offered say.
        let places = offered.iter().enumerate().filter_map(|(index, path)| {
            let path = path.to_str()?;
            Some((path.len(), index, text.strip_prefix(path)?.strip_prefix('@')?))
        });
        let (_, index, place) = places.max_by_key(|(length, ..)| *length).ok_or_else(|| {
            refuse("it begins with no path of --offer-file, as given there, and @")
        })?;
        let (server, local) = place.split_once('=').ok_or_else(|| refuse("it has no ="))?;
        maps[index].map(server, local).map_err(|error| refuse(&error.to_string()))?;
    }
    Ok(maps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_map_is_of_the_file_that_it_begins_with() {
        let offered = ["a", "a@b=c", "/d"].map(Path::new);
        let arguments = ["a@here:1=/x=y@z", "a@there=/x", "a@b=c@there=/y", "/d@there=/z"];
        let maps = maps(&arguments.map(str::to_owned), &offered).unwrap();
        let expected: [&[(&str, &str)]; 3] =
            [&[("here:1", "/x=y@z"), ("there", "/x")], &[("there", "/y")], &[("there", "/z")]];
        for (options, expected) in maps.iter().zip(expected) {
            let map = &options.local_path_map;
            let map: Vec<_> = map.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            assert_eq!(map, expected);
        }
    }

    #[test]
    fn what_is_no_map_is_refused() {
        for (arguments, why) in [
            (&["b@here=/x"][..], "no path of --offer-file"),
            (&["a"], "no path of --offer-file"),
            (&["a=/x"], "no path of --offer-file"),
            (&["a@here"], "no ="),
            (&["a@=/x"], "one word"),
            (&["a@he re=/x"], "one word"),
            (&["a@here=x"], "begins with /"),
            (&["a@here="], "begins with /"),
            (&["a@here=/x", "a@here=/y"], "already"),
        ] {
            let arguments: Vec<_> = arguments.iter().copied().map(str::to_owned).collect();
            let error = maps(&arguments, &[Path::new("a")]).unwrap_err().to_string();
            assert!(error.contains(why), "{arguments:?}: {error}");
        }
    }
}
