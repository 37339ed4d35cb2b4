//! The reference of all settings, as a document.

use super::environment::{IGNORED, OF_BINDINGS};
use super::table::settings;
use super::values::Values;

const INTRODUCTION: &str = "\
<!-- Written by `cargo xtask config-docs` from the table of settings: change that. -->

# Configuration

Settings of transfer engines, and where they come from. The later of these comes first:

1. the defaults below
2. a TOML file: the one that `MILLSTREAM_CONFIG` or `--config FILE` names
3. environment variables: `MC_` and a name, those of the original transfer engine; `MILLSTREAM_` and a name
   where it has none
4. arguments: `--set NAME=VALUE`, any number of times; options such as `--no-segmentation-offload`; and
   what a program says

`node`, `put`, `get`, `bench transfer` and `config` have `--config` and `--set`. A program has
`Settings::load` in `millstream_transfer`, which makes a `Config` and an `RdmaConfig` that the program may
change; without it, neither the file nor the environment is read.

`millstream config` prints each value and where it came from.

In the file, what stands before the dot of a name is a table:

```toml
slice_size = \"128KiB\"

[rdma]
retry_count = 3
patience = \"10s\"
```

Sizes are numbers of bytes, or have a unit: KiB, MiB, GiB. Times have a unit: us, ms, s, m, h. What is
no value of its setting is an error that names the variable, or the file and the line, and what the
setting can be. So is a name in the file that is no setting. A variable that is empty is as good as none.

";

/// The reference of all settings in Markdown: `docs/reference/configuration.md`.
pub fn reference() -> String {
    let defaults = Values::default();
    let mut text = INTRODUCTION.to_owned();
    text.push_str("## Settings\n\n");
    text.push_str("| name | variable | default | values | acts on | what it does |\n");
    text.push_str("| --- | --- | --- | --- | --- | --- |\n");
    for setting in settings() {
        let variables: Vec<_> = setting.variables.iter().map(|name| code(name)).collect();
        let default = setting.kind.show(&defaults);
        let default = if default.is_empty() { "nothing".to_owned() } else { code(&default) };
        let cells = [
            code(setting.key),
            variables.join(", "),
            default,
            setting.kind.range(),
            setting.scope.name().to_owned(),
            setting.meaning.to_owned(),
        ];
        text.push_str(&format!("| {} |\n", cells.join(" | ").replace("|  |", "| |")));
    }
    text.push_str(
        "\n## Secrets\n\n\
         These are no settings, so that `millstream config` and error messages do not show them.\n\n\
         | variable | what it has |\n| --- | --- |\n\
         | `MILLSTREAM_TOKEN` | the token, in place of the file of `security.token_file` |\n\
         | `MC_REDIS_PASSWORD` | the password of a Redis metadata server, where its URI has none |\n",
    );
    text.push_str(
        "\n## Variables of the bindings\n\n\
         The original has these, too. They are no settings: bindings obey them, and `millstream` says in a note that \
         it does not.\n\n| variable | in bindings | for the command |\n| --- | --- | --- |\n",
    );
    for it in OF_BINDINGS {
        text.push_str(&format!("| {} | {} | {} |\n", code(it.name), it.there, it.here));
    }
    text.push_str(
        "\n## Variables that change nothing\n\n\
         The original has these variables, too. They are accepted; `millstream` says in a note that \
         they are ignored, and why.\n\n| variable | why |\n| --- | --- |\n",
    );
    for (variable, reason) in IGNORED {
        text.push_str(&format!("| {} | {reason} |\n", code(variable)));
    }
    text.push_str(
        "\nOther variables that begin with `MC_` are told in a note, with the name that is most like \
         theirs.\n",
    );
    text
}

fn code(text: &str) -> String {
    format!("`{text}`")
}
