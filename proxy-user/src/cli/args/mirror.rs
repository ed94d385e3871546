//! Flags that are settings of the same names.

/// Defines the flags of a group, and their conversion to the settings of the same names: each field is written once.
macro_rules! flags_of {
    ($(#[$about:meta])* $args:ident => $settings:ty { $($(#[$flag:meta])* $name:ident: $value:ty,)+ }) => {
        $(#[$about])*
        pub struct $args {
            $($(#[$flag])* pub $name: $value,)+
        }

        impl From<$args> for $settings {
            fn from(args: $args) -> Self {
                Self { $($name: args.$name,)+ }
            }
        }
    };
}

pub(super) use flags_of;
