"""The one exception whose text is meant for a user."""


class UserError(Exception):
    """A mistake the user can fix: shown as one line (what, where, the fix), exit status 1, no traceback.

    Its text must never hold anything computed from sensitive records: it is printed in public.
    """
